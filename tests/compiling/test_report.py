"""Bounds, knobs and the report, on numbers made by hand."""

import re
import time
from itertools import islice

import pytest
from helpers.hand_timed import BASIS

from maxpipe.compiling.collectives import Collective
from maxpipe.compiling.knobs import Gain, Knob, gains, knobs
from maxpipe.compiling.links import LinkUse
from maxpipe.compiling.prediction.prediction import Prediction
from maxpipe.compiling.prediction.units import UnitSeconds
from maxpipe.compiling.report import CompilerMemory, CompileTimes, Report, size
from maxpipe.compiling.step import growing_silences, progress
from maxpipe.config import Config, replace, resolve
from maxpipe.devices.chips import GIB, chip_for
from maxpipe.planning.estimate import Memory, estimate, step_bounds
from maxpipe.planning.gather_mode import with_gather_mode

MEMORY = Memory(1e9, 2e9, 1e9, 4e9)
WRITTEN = replace(
    Config(),
    **{
        "mesh.ici.stage": 4,
        "mesh.ici.fsdp": 2,
        "pipeline.num_repeats": 2,
        "pipeline.schedule": "circular",
        "pipeline.remat_policy": "none",
        "data.global_batch_size": 64,
        "eval.every": 0,
    },
)


def report(needed=90 * GIB, **values):
    facts = {
        "device_kind": "TPU v5p",
        "num_devices": 8,
        "num_slices": 1,
        "mesh": {"stage": 4, "fsdp": 2, "tensor": 1},
        "engine": "scheduled",
        "schedule": "lockstep_1f1b",
        "bubble": 0.1,
        "shapes": MEMORY,
        "compiler": CompilerMemory(arguments=5, temp=6, program=7, results=8),
        "needed": needed,
        "capacity": 95 * GIB,
        "flops": 2e15,
        "model_flops": 1e15,
        "collectives": [Collective("all-gather", "fsdp", "ici", 4, 2**20, 2**21)],
        "bounds": None,
        "compile_times": CompileTimes(1.0, 0.5, 1.5),
    }
    return Report(**(facts | values))


def bounds_of(**values):
    flops = 8 * 459e12
    facts = {"num_chips": 8, "flops": flops, "model_flops": flops / 2, "memory": MEMORY}
    config, chip = resolve(WRITTEN, 8), chip_for("TPU v5p")
    return step_bounds(config, chip, **(facts | {"network": 0.0} | values))


def test_step_bounds_are_those_of_the_slowest_part():
    quiet, loud = bounds_of(), bounds_of(network=4.0)
    assert quiet.compute == pytest.approx(1.0)
    assert quiet.mfu == pytest.approx(0.5)
    assert loud.step == loud.network == 4.0
    assert loud.mfu == pytest.approx(0.125)


def test_step_bounds_without_a_known_network_leave_it_out():
    bounds = bounds_of(network=None)
    assert bounds.network is None
    assert bounds.step == pytest.approx(1.0)


def test_report_names_the_links_and_their_times():
    links = [
        LinkUse("fsdp", "ici", "collectives", 2, 6, 1e9, 0.25),
        LinkUse("data", "dcn", "collectives", None, None, 1e9, None),
    ]
    text = "\n".join(report(links=links).lines())
    assert re.search(r"collectives +fsdp +2 of 6 links, 0.25 s", text)
    assert re.search(r"collectives +data +network card \(DCN\), unknown", text)
    assert [use["links"] for use in report(links=links).as_json()["links"]] == [2, None]


def test_report_says_where_the_time_to_compile_went():
    assert (
        "compiled    in 60 s: tracing 6, lowering 4, compiling 50"
        in report(compile_times=CompileTimes(6.0, 4.0, 50.0)).lines()
    )
    assert not [line for line in report(compile_times=None).lines() if "compiled " in line]


def test_as_json_has_every_number():
    data = report().as_json()
    assert data["memory"] == {
        "parameters_bytes": 1e9,
        "optimizer_bytes": 2e9,
        "gradients_bytes": 1e9,
        "activations_bytes": 4e9,
        "in_use_bytes": 0.0,
        "arguments_bytes": 5,
        "temp_bytes": 6,
        "program_bytes": 7,
        "needed_bytes": 90 * GIB,
        "capacity_bytes": 95 * GIB,
    }
    assert (data["flops"], data["model_flops"], data["compile_seconds"], data["fits"]) == (
        2e15,
        1e15,
        3.0,
        True,
    )
    assert data["compile_times"] == {"tracing": 1.0, "lowering": 0.5, "compiling": 1.5}
    assert data["collectives"][0]["axes"] == "fsdp"


@pytest.mark.parametrize(
    ("repeats", "stage", "words"),
    [
        (2, "a stage with its 2 chunks", "forward=3 backward=8 head=0.5"),
        (1, "a stage", "forward=1.5 backward=4 head=0.5"),
    ],
)
def test_words_for_schedules_are_of_whole_stages_and_units_in_json_of_one_chunk(
    repeats, stage, words
):
    units = UnitSeconds(1.5, 4.0, None, None, head=0.5, repeats=repeats)
    timed = report(predicted=Prediction(1.0, BASIS, {}, units=units))
    assert f"  units of {stage}, for maxpipe.schedule: {words}" in timed.lines()
    data = timed.as_json()
    assert data["schedule_words"] == words
    assert (data["predicted"]["units"]["forward"], data["predicted"]["units"]["repeats"]) == (
        1.5,
        repeats,
    )
    assert report().as_json()["schedule_words"] is None


def test_memory_is_named_in_words():
    line = next(line for line in report().lines() if line.startswith("memory"))
    assert line.endswith("GiB, copies of weights in use and their gradients 0 B")
    assert "_" not in line


def test_report_without_a_known_memory_does_not_say_whether_it_fits():
    found = report(capacity=None)
    assert found.as_json()["fits"] is None
    assert found.fits
    assert "their memory is not known" in found.lines()[-1]


def test_report_of_a_step_that_does_not_fit_says_by_how_much_and_what_helps():
    found = report(97 * GIB, knobs=[Knob("a=1", 3.0 * GIB), Knob("b=2", 1.0 * GIB)])
    text = "\n".join(found.lines())
    assert not found.fits
    assert "does NOT fit: 97 GiB of 95 GiB, 2 GiB too much" in text
    assert [line.endswith("enough") for line in found.lines()[-2:]] == [True, False]
    assert "of 95 GiB by the compiler's own count" not in text
    given_up = report(97 * GIB, compiler=None).lines()
    assert any("97 GiB of 95 GiB by the compiler's own count" in line for line in given_up)


def test_report_without_a_knob_advises_more_devices():
    assert "take more of them" in report(97 * GIB).lines()[-1]


def test_knobs_are_legal_and_save_what_they_say():
    resolved = resolve(WRITTEN, 8)
    found = knobs(WRITTEN, resolved, 8, 1, None)
    words = [knob.words for knob in found]
    assert "pipeline.remat_policy=full" in words
    assert "pipeline.schedule=lockstep_1f1b pipeline.engine=auto" in words
    assert [knob.saves for knob in found] == sorted((knob.saves for knob in found), reverse=True)
    full = resolve(replace(WRITTEN, **{"pipeline.remat_policy": "full"}), 8)
    saved = next(knob.saves for knob in found if knob.words == "pipeline.remat_policy=full")
    assert saved == pytest.approx(estimate(resolved, None).total - estimate(full, None).total)


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 B"), (2048, "2 KiB"), (3 * 2**30, "3 GiB"), (1023 * 2**30, "0.999 TiB")],
)
def test_size_has_three_digits_and_a_unit(count, text):
    assert size(count) == text


FULL = replace(WRITTEN, **{"pipeline.remat_policy": "full", "pipeline.schedule": "lockstep_1f1b"})


def gains_with(capacity, resolved, **values):
    """Return the gains of a step that needs what the estimate says, at an MFU of 1/FLOPs."""
    facts = {
        "needed": estimate(resolved, None).total,
        "capacity": capacity,
        "tpu": None,
        "flops": 4.0,
        "mfu": 0.25,
        "bound_mfu": lambda config, flops: 1 / flops,
    }
    return gains(FULL, resolved, (8, 1), **(facts | values))


def test_gains_save_more_fit_and_are_faster():
    resolved = with_gather_mode(resolve(FULL, 8), None)
    best = gains_with(95 * GIB, resolved)[0]
    assert best.words == "pipeline.remat_policy=minimal"
    minimal = resolve(replace(FULL, **{"pipeline.remat_policy": "minimal"}), 8)
    assert best.needed == pytest.approx(estimate(minimal, None).total)
    # Three of four passes are left; attention and the head count too.
    assert 0.25 < best.mfu < 0.25 * 4 / 3


def test_gains_that_do_not_fit_or_do_not_help_are_left_out():
    resolved = with_gather_mode(resolve(FULL, 8), None)
    assert gains_with(1.01 * estimate(resolved, None).total, resolved) == []
    assert gains_with(95 * GIB, resolved, bound_mfu=lambda config, flops: 0.25) == []


def test_report_names_what_idle_memory_buys():
    bounds = bounds_of()
    words = "pipeline.remat_policy=minimal"
    gains = [Gain(words, "", 64 * GIB, 0.728), Gain(words, "compiles 8 layers", 64 * GIB, 0.728)]
    lines = report(12.4 * GIB, bounds=bounds, gains=gains).lines()
    last, unrolled = (line for line in lines if words in line)
    assert last.endswith("would fit: 64 GiB of 95 GiB, MFU at most 50.0 -> 72.8 %")
    assert unrolled == f"{last}; compiles 8 layers"


def test_report_of_a_known_chip_never_calls_it_unknown():
    gave_up = "\n".join(report(97 * GIB, compiler=None).lines())
    assert "bounds      none, since the compiler gave up" in gave_up
    assert "not in the table" not in gave_up
    assert "not in the table" in "\n".join(report(device_kind="TPU v2").lines())


def test_report_names_a_chip_as_people_do():
    assert "8 x TPU v5p: " in report(device_kind="TPU v5").lines()[0]
    assert "8 x TPU v6e: " in report(device_kind="TPU v6 lite").lines()[0]


def test_progress_notes_the_phase_and_then_the_seconds_ever_less_often():
    lines, began = [], time.monotonic()
    with progress("compiling", lines.append, first_seconds=0.02):
        while len(lines) < 4 and time.monotonic() < began + 30:
            time.sleep(0.01)
    count, took = len(lines), time.monotonic() - began
    assert lines[0].startswith("compiling   the program")
    assert re.fullmatch(r"compiling   for \d+ s", lines[1])
    assert took >= 0.02 + 0.04 + 0.08
    time.sleep(0.2)
    assert len(lines) == count >= 4


def test_silences_grow_to_some_minutes():
    assert [*islice(growing_silences(), 7)] == [15, 30, 60, 120, 240, 240, 240]
