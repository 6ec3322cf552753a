"""Bounds and the report, on numbers made by hand."""

import re
import time

import pytest
from helpers.hand_timed import BASIS

from maxpipe.compile.collectives import Collective, LinkUse
from maxpipe.compile.knobs import Knob
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.unit_times import UnitSeconds
from maxpipe.compile.report import CompilerMemory, CompileTimes, Report, size
from maxpipe.compile.step import progress
from maxpipe.config import Config, replace, resolve
from maxpipe.devices.chips import GIB, chip_for
from maxpipe.plan.estimate import step_bounds
from maxpipe.plan.search.memory import Memory

MEMORY = Memory(1e9, 2e9, 1e9, 4e9, 0.0)
WRITTEN = replace(
    Config(), **{"mesh.ici.stage": 4, "mesh.ici.fsdp": 2, "data.global_batch_size": 64}
)


def report(needed=90 * GIB, **values):
    memory = CompilerMemory(arguments=5, temp=6, program=7, results=8)
    facts = {"device_kind": "TPU v5p", "num_devices": 8, "num_slices": 1, "bounds": None}
    facts |= {"engine": "scheduled", "schedule": "lockstep_1f1b", "bubble": 0.1}
    facts |= {"shapes": MEMORY, "compiler": memory, "needed": needed, "capacity": 95 * GIB}
    facts |= {"flops": 2e15, "model_flops": 1e15, "compile_times": CompileTimes(1.0, 0.5, 1.5)}
    facts["mesh"] = {"stage": 4, "fsdp": 2, "tensor": 1}
    facts["collectives"] = [Collective("all-gather", "fsdp", "ici", 4, 2**20, 2**21)]
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
    assert bounds_of(network=None).step == pytest.approx(1.0)  # of an unknown network


def test_report_says_what_is_known_of_chip_links_and_memory():
    links = [
        LinkUse("fsdp", "ici", "collectives", 2, 6, 1e9, 0.25),
        LinkUse("data", "dcn", "collectives", None, None, 1e9, None),
    ]
    text = "\n".join(report(links=links, device_kind="TPU v5").lines())
    assert "8 x TPU v5p: " in text
    assert "compiled    in 3 s: tracing 1, lowering 0, compiling 2\n" in text
    assert re.search(r"collectives +fsdp +2 of 6 links, 0.25 s", text)
    assert re.search(r"collectives +data +network card \(DCN\), unknown", text)
    assert "their memory is not known" in report(capacity=None).lines()[-1]
    gave_up = "\n".join(report(97 * GIB, compiler=None).lines())
    assert "bounds      none, since the compiler gave up" in gave_up
    assert "not in the table" in "\n".join(report(device_kind="TPU v2").lines())
    assert [size(n) for n in (12, 2048, 1023 * 2**30)] == ["12 B", "2 KiB", "0.999 TiB"]


def test_as_json_has_the_numbers_and_words_for_schedules_are_of_whole_stages():
    units = UnitSeconds(1.5, 4.0, None, None, head=0.5, repeats=2)
    timed = report(predicted=Prediction(1.0, BASIS, {}, units=units))
    words = "forward=3 backward=8 head=0.5"
    assert f"  units of a stage with its 2 chunks, for maxpipe.schedule: {words}" in timed.lines()
    data = timed.as_json()
    assert data["schedule_words"] == words
    assert data["predicted"]["units"]["forward"] == 1.5  # of one chunk
    assert data["memory"]["parameters_bytes"] == 1e9
    assert (data["memory"]["temp_bytes"], data["memory"]["needed_bytes"]) == (6, 90 * GIB)
    assert (data["flops"], data["model_flops"], data["fits"]) == (2e15, 1e15, True)
    assert data["compile_times"] == {"tracing": 1.0, "lowering": 0.5, "compiling": 1.5}
    assert data["compile_seconds"] == 3.0
    assert data["collectives"][0]["axes"] == "fsdp"
    unknown = report(capacity=None).as_json()
    assert unknown["fits"] is unknown["schedule_words"] is None


def test_report_of_a_step_that_does_not_fit_says_by_how_much_and_what_helps():
    found = report(97 * GIB, knobs=[Knob("a=1", 3.0 * GIB), Knob("b=2", 1.0 * GIB)])
    text = "\n".join(found.lines())
    assert not found.fits
    assert "does NOT fit: 97 GiB of 95 GiB, 2 GiB too much" in text
    assert [line.endswith("enough") for line in found.lines()[-2:]] == [True, False]
    assert "take more of them" in report(97 * GIB).lines()[-1]


def test_progress_notes_the_seconds_ever_less_often():
    lines, began = [], time.monotonic()
    with progress("compiling", lines.append, first_seconds=0.02):
        while len(lines) < 3 and time.monotonic() < began + 30:
            time.sleep(0.01)
    assert len(lines) >= 3
    assert re.fullmatch(r"compiling   for \d+ s", lines[0])
    assert time.monotonic() - began >= 0.02 + 0.04 + 0.08
