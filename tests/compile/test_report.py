"""Bounds, knobs and the report, on numbers made by hand."""

import re
import time
from itertools import islice

import pytest
from helpers.hand_timed import BASIS

from maxpipe.compile.collectives import Collective
from maxpipe.compile.knobs import Knob, gains, knobs
from maxpipe.compile.links import LinkUse
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.unit_times import UnitSeconds
from maxpipe.compile.report import CompilerMemory, CompileTimes, Report, size
from maxpipe.compile.step import growing_silences, progress
from maxpipe.config import Config, replace, resolve
from maxpipe.devices.chips import GIB, chip_for
from maxpipe.plan.estimate import Memory, estimate, step_bounds
from maxpipe.plan.gather_mode import with_gather_mode

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
    unknown = bounds_of(network=None)
    assert unknown.network is None
    assert unknown.step == pytest.approx(1.0)


def test_report_says_what_is_known_of_chip_links_and_memory():
    links = [
        LinkUse("fsdp", "ici", "collectives", 2, 6, 1e9, 0.25),
        LinkUse("data", "dcn", "collectives", None, None, 1e9, None),
    ]
    text = "\n".join(report(links=links, device_kind="TPU v5").lines())
    assert "8 x TPU v5p: " in text
    assert re.search(r"collectives +fsdp +2 of 6 links, 0.25 s", text)
    assert re.search(r"collectives +data +network card \(DCN\), unknown", text)
    assert "compiled    in 60 s: tracing 6, lowering 4, compiling 50" in (
        report(compile_times=CompileTimes(6.0, 4.0, 50.0)).lines()
    )
    unknown = report(capacity=None)
    assert unknown.as_json()["fits"] is None
    assert unknown.fits
    assert "their memory is not known" in unknown.lines()[-1]
    gave_up = "\n".join(report(97 * GIB, compiler=None).lines())
    assert "bounds      none, since the compiler gave up" in gave_up
    assert "not in the table" in "\n".join(report(device_kind="TPU v2").lines())
    assert [size(n) for n in (12, 2048, 1023 * 2**30)] == ["12 B", "2 KiB", "0.999 TiB"]


def test_words_for_schedules_are_of_whole_stages_and_units_in_json_of_one_chunk():
    units = UnitSeconds(1.5, 4.0, None, None, head=0.5, repeats=2)
    timed = report(predicted=Prediction(1.0, BASIS, {}, units=units))
    words = "forward=3 backward=8 head=0.5"
    assert f"  units of a stage with its 2 chunks, for maxpipe.schedule: {words}" in timed.lines()
    data = timed.as_json()
    assert data["schedule_words"] == words
    assert data["predicted"]["units"]["forward"] == 1.5
    assert report().as_json()["schedule_words"] is None


def test_as_json_has_the_numbers():
    data = report().as_json()
    assert data["memory"]["parameters_bytes"] == 1e9
    assert (data["memory"]["temp_bytes"], data["memory"]["needed_bytes"]) == (6, 90 * GIB)
    assert (data["flops"], data["model_flops"], data["fits"]) == (2e15, 1e15, True)
    assert data["compile_times"] == {"tracing": 1.0, "lowering": 0.5, "compiling": 1.5}
    assert data["compile_seconds"] == 3.0
    assert data["collectives"][0]["axes"] == "fsdp"


def test_report_of_a_step_that_does_not_fit_says_by_how_much_and_what_helps():
    found = report(97 * GIB, knobs=[Knob("a=1", 3.0 * GIB), Knob("b=2", 1.0 * GIB)])
    text = "\n".join(found.lines())
    assert not found.fits
    assert "does NOT fit: 97 GiB of 95 GiB, 2 GiB too much" in text
    assert [line.endswith("enough") for line in found.lines()[-2:]] == [True, False]
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
    # What does not fit, or is not faster, is left out.
    assert gains_with(1.01 * estimate(resolved, None).total, resolved) == []
    assert gains_with(95 * GIB, resolved, bound_mfu=lambda config, flops: 0.25) == []


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
    assert [*islice(growing_silences(), 7)] == [15, 30, 60, 120, 240, 240, 240]
