"""A step of the mpmd engine composed from its units' times, worked out by hand; and on a TPU."""

import re

import pytest
from helpers.compile_command import report_of, tpu_aot
from helpers.hand_timed import BASIS

from maxpipe.compile.prediction.operations import Part, Price
from maxpipe.compile.prediction.origins import Origin
from maxpipe.compile.prediction.stage_timeline import predict_stages, stage_words, unit_costs
from maxpipe.compile.prediction.walk import OUTSIDE, Place, Spent, Timeline
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.plan.simulate import simulate


def timeline(products, wait=0.0, price=1.0):
    place = Place(OUTSIDE, "", 1.0)
    parts = [
        Spent("m", Price(Part.MATRIX_PRODUCTS, price), Origin(), place, products),
        Spent("g", Price(Part.COLLECTIVES, 1.0, "all-gather", "fsdp"), Origin(), place, wait),
    ]
    return Timeline(seconds=products + wait, spent=parts)


def table():
    return load_schedule("1f1b", num_stages=2, num_microbatches=3)


# Two stages, three microbatches; stage 1 is the slower one. A transfer takes 0.5 s.
TIMELINES = {
    UnitName("F", 0): timeline(1.0),
    UnitName("F", 1): timeline(1.0, wait=1.0),
    UnitName("B", 1): timeline(4.0),
    UnitName("B", 0): timeline(2.0),
}


def test_stages_are_composed_in_the_order_of_the_schedule():
    predicted = predict_stages(table(), TIMELINES, BASIS, communication=0.5)
    # F0 1, transfer 0.5, three times F1 and B1 (2 + 4), transfer 0.5, B0 2.
    assert predicted.seconds == pytest.approx(1 + 0.5 + 3 * 6 + 0.5 + 2)
    assert predicted.parts[Part.MATRIX_PRODUCTS] == pytest.approx(3 * (1 + 4 + 1 + 2) / 2)
    assert predicted.parts[Part.COLLECTIVES] == pytest.approx(3 * 1.0 / 2)
    assert predicted.collectives == [("all-gather", "fsdp", pytest.approx(1.5))]
    assert predicted.bubble == pytest.approx(predicted.seconds - (9 + 18) / 2)
    assert "bubble, besides the above" in "\n".join(predicted.lines())
    data = predicted.as_json()
    assert (data["bubble_in_parts"], data["leaves_out"]) == (False, [])


def test_stages_update_their_parameters_when_the_last_has_its_gradients():
    updates = {
        UnitName("update", 0): timeline(1.0, wait=0.5),
        UnitName("update", 1): timeline(0.25),
    }
    predicted = predict_stages(table(), TIMELINES | updates, BASIS, communication=0.5)
    # Stage 0 ends last, and its update takes longest.
    assert predicted.seconds == pytest.approx(22 + 1.5)
    assert predicted.parts[Part.MATRIX_PRODUCTS] == pytest.approx(12 + (1.0 + 0.25) / 2)
    assert predicted.parts[Part.COLLECTIVES] == pytest.approx((3 * 1.0 + 0.5) / 2)
    assert sum(predicted.parts.values()) + predicted.bubble == pytest.approx(predicted.seconds)


def test_stages_gather_and_reduce_once_a_step():
    ends = {
        UnitName("gather", 0): timeline(0.0, wait=0.25),
        UnitName("reduce", 0): timeline(0.0, wait=3.0),
        UnitName("reduce", 1): timeline(0.0, wait=2.0),
    }
    predicted = predict_stages(table(), TIMELINES | ends, BASIS, communication=0.5)
    # Stage 0 ends last; what stage 1 does at its end is hidden by it.
    assert predicted.seconds == pytest.approx(22 + 0.25 + 3)
    assert predicted.parts[Part.COLLECTIVES] == pytest.approx((3 * 1.0 + 2.0 + 3.25) / 2)
    assert predicted.bubble == pytest.approx(predicted.seconds - (9 + 3.25 + 18 + 2) / 2)


def test_stages_with_a_unit_of_unknown_time_have_no_predicted_step():
    unknown = timeline(1.0, price=None)
    predicted = predict_stages(table(), TIMELINES | {UnitName("F", 0): unknown}, BASIS, 0.0)
    assert predicted.seconds is None
    assert predicted.unknown == ["matrix products without estimated_cycles: m"]


def test_stage_words_reproduce_the_step_in_the_simulator():
    costs = unit_costs(table(), TIMELINES, 0.5)
    assert stage_words(table(), costs) == "forward=1,2 backward=2,4 comm=0.5"
    assert simulate(table(), costs).makespan == pytest.approx(22)


class TestTpu:
    pytestmark = tpu_aot

    def test_compile_of_mpmd_predicts_its_step_and_weighs_its_stages(self, tmp_path):
        words = (
            *("compile.topology=v5e:2x2", "model.num_layers=2", "model.attention=dot_product"),
            *("pipeline.schedule=1f1b", "pipeline.num_repeats=1", "pipeline.num_microbatches=4"),
        )
        report, text = report_of(tmp_path, "configs/base.yml", *words)
        assert report["fits"] is True
        assert len(report["stages"]) == 2
        predicted = report["predicted"]
        assert predicted["unknown"] == predicted["leaves_out"] == []
        work = sum(predicted["parts"].values())
        assert report["predicted_step_seconds"] == pytest.approx(work + predicted["bubble"])
        assert 0 < predicted["mfu"] < 1
        assert f"units of each stage, for maxpipe.schedule: {report['schedule_words']}\n" in text
        (forward,) = re.findall(r"forward=\S+,(\S+) ", report["schedule_words"])
        seconds = {program["name"]: program["predicted_seconds"] for program in report["programs"]}
        assert seconds["F1"] == pytest.approx(float(forward), rel=1e-3)
        assert 0 < seconds["update0"] < report["predicted_step_seconds"]
        assert "verdict     fits: " in text
