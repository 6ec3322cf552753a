"""Engines whose weights are gathered along the lines of a torus, and then across them."""

import re

import pytest
from helpers.compile_command import NARROW, QUICK, report_of, tpu_aot
from helpers.engines import EngineUnderTest, assert_equals_one_device, make_batch, make_mesh, tiny
from helpers.programs import executed, loop_bodies

from maxpipe import builder
from maxpipe.builder import build_engine_inputs
from maxpipe.config import load
from maxpipe.config.sections.parallelism import DEFAULT_RULES

ROWS = 16
STAGES = "stage=2 num_microbatches=2 num_repeats=2 "
CASES = {
    "sequential": "engine=sequential",
    "sequential_unrolled": "engine=sequential num_microbatches=2 scan_layers=false",
    "scheduled": STAGES + "schedule=lockstep_1f1b",
    "scheduled_once": STAGES + "schedule=lockstep_1f1b fsdp_gather=once",
    "circular": STAGES + "schedule=circular",
    "circular_per_repeat": STAGES + "schedule=circular fsdp_gather=per_repeat",
    "mpmd": STAGES + "schedule=interleaved_1f1b",
}
FIRST = ("sequential", "scheduled", "mpmd")
MARKED = [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.slow]) for n in CASES]


def of_lines(monkeypatch, name, words="", **values):
    monkeypatch.setattr(builder, "line_length", lambda mesh: min(2, mesh.shape["fsdp"]))
    return tiny(f"fsdp=4 {CASES[name]} {words}", **values)


@pytest.mark.parametrize("name", MARKED)
def test_engine_equals_one_device_with_gathers_in_two_steps(name, monkeypatch):
    assert_equals_one_device(of_lines(monkeypatch, name))


ONCE = pytest.param("scheduled_once", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["scheduled", ONCE])
def test_engine_equals_one_device_with_stages_in_different_slices(name, monkeypatch):
    monkeypatch.setattr(builder, "crossing_axes", lambda mesh: ("stage",))
    assert_equals_one_device(tiny("fsdp=4 " + CASES[name]))


@pytest.mark.parametrize("name", ["sequential", ONCE])
def test_weights_are_gathered_twice_as_often_by_groups_of_two_and_it_is_said(name, monkeypatch):
    config = of_lines(monkeypatch, name)

    def gathers():
        compiled = EngineUnderTest(config).compile(make_batch(ROWS))
        counts = executed(compiled.as_text())
        return sum(n for key, n in counts.items() if key.kind == "all-gather")

    notes = []
    build_engine_inputs(config, make_mesh(config), note=notes.append)
    (note,) = [note for note in notes if "fsdp" in note]
    assert note.startswith("weights are gathered in two steps: ")
    assert "2 of the 4 devices" in note
    in_two_steps = gathers()
    monkeypatch.setattr(builder, "line_length", lambda mesh: 1)
    assert in_two_steps > 1.5 * gathers()


@pytest.mark.parametrize(("order", "steps"), [(["tensor", "fsdp"], 2), (["fsdp", "tensor"], 1)])
def test_weights_split_over_tensor_as_well_stay_so(order, steps, monkeypatch):
    """Shards along fsdp are not next to each other where tensor splits each of them."""
    replaced = {"embed": [], "outer_embed": [], "mlp": order}
    rules = [[name, replaced.get(name, axes)] for name, axes in DEFAULT_RULES]
    values = {"sharding.logical_axis_rules": rules}
    config = of_lines(monkeypatch, "sequential", "tensor=2", **values)
    assert_equals_one_device(config)
    in_groups = re.search(r"axis_index_groups=[^N]", str(EngineUnderTest(config).traced()))
    assert bool(in_groups) == (steps == 2)


def test_weights_gathered_in_two_steps_are_not_saved_for_the_backward(monkeypatch):
    """With remat_policy=none the forward saves all but weights."""
    config = of_lines(monkeypatch, "sequential", "remat_policy=none")

    def saved():
        bodies = loop_bodies(EngineUnderTest(config).traced())
        return [sorted(str(v.aval) for v in body.outvars) for body in bodies]

    in_two_steps = saved()
    monkeypatch.setattr(builder, "line_length", lambda mesh: 1)
    assert len(in_two_steps) == 2
    assert in_two_steps == saved()


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.slow
    def test_program_for_a_whole_torus_gathers_weights_in_two_steps(self, tmp_path):
        """In one step libtpu makes each gather a sum, of arrays padded with zeros."""
        words = ("compile.topology=v5p:4x4x4", "mesh.ici.stage=1", "mesh.ici.fsdp=64")
        sizes = ("model.num_layers=2", "data.global_batch_size=64", "pipeline.num_microbatches=1")
        report, said = report_of(
            tmp_path, "configs/base.yml", *NARROW, *words, *sizes, environment=QUICK
        )
        gathers = [c for c in report["collectives"] if c["kind"] == "all-gather"]
        assert sum(gather["count"] for gather in gathers) >= 2 * 2 * 7 * 2
        assert "first among 4 of the 64 devices" in said

    def test_program_of_stages_in_different_slices_exchanges_shards_of_the_head(self, tmp_path):
        """Of its gradient, float32, each device sends to the other slice its part over fsdp."""
        mesh = ("compile.num_slices=2", "mesh.ici.stage=1", "mesh.dcn.stage=2", "mesh.ici.fsdp=4")
        sizes = ("pipeline.num_microbatches=2", "data.global_batch_size=32", "model.num_layers=2")
        schedule = ("pipeline.schedule=lockstep_1f1b", "pipeline.num_repeats=1")
        words = ("compile.topology=v5e:2x2", *mesh, *sizes, *schedule)
        report, _ = report_of(tmp_path, "configs/base.yml", *NARROW, *words, environment=QUICK)
        (summed,) = (
            c
            for c in report["collectives"]
            if (c["kind"], c["network"]) == ("reduce-scatter", "dcn")
        )
        model = load("configs/base.yml", NARROW).config.model
        assert summed["bytes"] == 4 * model.vocab_size * model.embed_dim / 4
        assert summed["sent_bytes"] == summed["bytes"] / 2
