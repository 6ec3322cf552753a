"""The mpmd engine: gradients as the sequential engine's, order and memory as in the table."""

import dataclasses
import itertools
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest
from jax.sharding import PartitionSpec as P

from maxpipe.config.options import update
from maxpipe.pipeline.engines.mpmd import runner, staged
from maxpipe.pipeline.engines.mpmd.staged import UnitCompiler
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.plan.simulate import Costs, simulate
from maxpipe.plan.solve import solve
from maxpipe.plan.solver_task import Task

ROWS = 48


def config_of(**case):
    stages, chunks = case.get("stages", 2), case.get("chunks") or []
    return tiny(
        **{
            "pipeline.engine": "mpmd",
            "pipeline.schedule": case.get("schedule", "1f1b"),
            "pipeline.num_microbatches": case.get("microbatches", 4),
            "pipeline.num_repeats": case.get("repeats", 1),
            "pipeline.layers_per_stage": chunks,
            "pipeline.remat_policy": case.get("remat", "full"),
            "pipeline.remat_layers": case.get("remat_layers", False),
            "pipeline.scan_layers_per_stage": case.get("scan", False),
            "model.num_layers": sum(chunks)
            or stages * case.get("repeats", 1) * case.get("layers", 1),
            "model.tie_embeddings": case.get("tied", False),
            "model.dropout": case.get("dropout", 0.0),
            "model.block": case.get("block", "llama"),
            "model.z_loss": 1e-2,
            "data.global_batch_size": ROWS,
            "mesh.ici.stage": stages,
            "mesh.ici.fsdp": case.get("fsdp", 1),
            "mesh.ici.tensor": case.get("tensor", 1),
        }
    )


def test_mpmd_engine_with_tied_embeddings_on_both_stages_equals_sequential():
    """Every stage has four devices."""
    config = config_of(
        tied=True, dropout=0.2, fsdp=2, tensor=2, microbatches=3, remat="none", scan=True
    )
    assert_same(MpmdUnderTest(config).train(make_batch(ROWS)), reference(config.model, ROWS))


@pytest.mark.parametrize(("chunks", "same"), [([1, 1, 1, 1], True), ([1, 1, 2, 1], False)])
def test_chunks_that_differ_only_in_their_devices_are_compiled_once(chunks, same):
    """All four stages have two devices; the ends have the embedding and the head."""
    engine = MpmdUnderTest(config_of(stages=4, chunks=chunks, fsdp=2)).engine
    units = {str(unit.name): unit for unit in engine.compile()}
    assert {unit.stage for unit in units.values()} == {0, 1, 2, 3}
    for kind in ("F", "B"):
        compiled = [units[f"{kind}{chunk}"].compiled for chunk in range(4)]
        assert (compiled[1] is compiled[2]) == same
        assert compiled[0] is not compiled[1]
        assert compiled[3] is not compiled[2]


def test_programs_compiled_for_other_devices_are_those_of_the_stages():
    engine = MpmdUnderTest(config_of(fsdp=2)).engine
    first = engine.meshes[0].devices
    own = list(engine.compile())
    assert {d for unit in own for d in devices_of(unit)} > set(first.flat)
    other = list(engine.compile(meshes=[engine.meshes[0]] * 2))
    assert {d for unit in other for d in devices_of(unit)} == set(first.flat)
    assert [unit.name for unit in other] == [unit.name for unit in own]


def test_programs_for_other_devices_lay_out_what_the_stages_own_processes_send(monkeypatch):
    """Both stages of this process stand for those of two, which have the devices' numbers."""
    engine = MpmdUnderTest(config_of(fsdp=2)).engine
    monkeypatch.setattr(staged, "processes_of", lambda mesh: frozenset([mesh.devices.flat[0].id]))
    seen = []
    monkeypatch.setattr(runner, "sent_spec", lambda *value: seen.append(value) or P("fsdp"))
    engine.training.placed_on([engine.meshes[0]] * 2)
    assert seen


def devices_of(unit):
    return [d for s in jax.tree.leaves(unit.compiled.input_shardings) for d in s.device_set]


def devices_at(*places):
    """Return a mesh of devices at these coordinates, in slice 0 if they name none."""
    devices = [
        SimpleNamespace(coords=place[:2], slice_index=[*place[2:], 0][0]) for place in places
    ]
    return SimpleNamespace(devices=np.array(devices, object))


@pytest.mark.parametrize(
    ("name", "places", "same"),
    [
        ("F2", [(2, 3), (3, 3)], True),  # elsewhere, a neighbour in the same direction
        ("F2", [(0, 0), (0, 1)], False),
        ("F2", [(1, 0), (0, 0)], False),
        ("F2", [(0, 0, 1), (1, 0, 1)], True),
        ("F2", [(0, 0, 0), (1, 0, 1)], False),  # in another slice
        ("F2 of other values", [(0, 0), (1, 0)], False),
    ],
)
def test_programs_are_the_same_for_devices_with_the_same_relative_coordinates(name, places, same):
    def lowered(name):
        text = f"module @jit_{name.replace(' ', ' {', 1)}"
        return SimpleNamespace(as_text=lambda: text, compile=object)

    compiler = UnitCompiler()
    first = compiler.compile(lowered("F1"), devices_at((0, 0), (1, 0)))
    assert (compiler.compile(lowered(name), devices_at(*places)) is first) == same


def test_mpmd_engine_with_both_ends_of_the_model_on_one_stage_equals_sequential():
    """Split backwards, uneven chunks."""
    config = config_of(schedule="zb_v", repeats=2, tied=True, chunks=[1, 2, 1, 1], remat="minimal")
    mpmd = MpmdUnderTest(config)
    assert_same(mpmd.train(make_batch(ROWS)), reference(config.model, ROWS))


def test_mpmd_engine_with_a_table_that_was_solved_equals_sequential(tmp_path):
    """Its backwards are of both forms, B, and I with W."""
    task = Task(2, 4, 1, "loop", False, 3, Costs(1, 2, 1.4, 0.9, 0.05))
    table = solve(task, 0, lambda *state: None).run.table
    assert table.kinds == ("F", "B", "I", "W")
    path = tmp_path / "best.csv"
    path.write_text(to_csv(table))
    config = config_of(schedule=str(path), layers=2, remat="minimal")
    mpmd = MpmdUnderTest(config)
    assert_same(mpmd.train(make_batch(ROWS)), reference(config.model, ROWS))


@pytest.mark.parametrize(
    ("schedule", "repeats"), [pytest.param("zb_v", 2, marks=pytest.mark.slow), ("zb_h2", 1)]
)
def test_mpmd_engine_with_an_order_that_follows_unit_times_equals_sequential(schedule, repeats):
    case = {"schedule": schedule, "repeats": repeats, "tied": True, "remat": "minimal"}
    config = config_of(**case)
    timed = update(config, {"pipeline.unit_times": [1.0, 1.4, 0.9, 0.5, 0.7]})
    assert to_csv(build_table(timed)) != to_csv(build_table(config))
    mpmd = MpmdUnderTest(timed)
    assert_same(mpmd.train(make_batch(ROWS)), reference(config.model, ROWS))


REPEATS = {
    "gpipe": (1,),
    "1f1b": (1,),
    "eager_1f1b": (1,),
    "interleaved_1f1b": (1, 2),
    "zb_h1": (1,),
    "interleaved_zb": (2,),
    "zb_h2": (1,),
    "zb_v": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (2,),
}
REMAT = (("full", False), ("minimal", True), ("none", False))


def product():
    """Schedules, sizes and numbers of microbatches; the other options are cycled through."""
    sizes = [
        (name, S, V, M)
        for name, repeats in REPEATS.items()
        for S in (2, 4)
        for V in repeats
        for M in (S, S + 2, 4 * S)
    ]
    options = itertools.cycle(
        itertools.product((False, True), (0.0, 0.2), (True, False), (False, True), REMAT)
    )
    for (name, S, V, M), (tied, dropout, packed, uneven, (remat, layers)) in zip(
        sizes, options, strict=False
    ):
        chunks = [1 + (c % 3 == 1) for c in range(S * V)] if uneven else []
        case = {
            "schedule": name,
            "stages": S,
            "repeats": V,
            "microbatches": M,
            "tied": tied,
            "dropout": dropout,
            "packed": packed,
            "chunks": chunks,
            "remat": remat,
            "remat_layers": layers,
        }
        yield pytest.param(case, id=f"{name}-S{S}-V{V}-M{M}")


@pytest.mark.grid
@pytest.mark.parametrize("case", product())
def test_mpmd_engine_in_the_full_product_equals_sequential(case):
    config = config_of(**case)
    actual = MpmdUnderTest(config).train(make_batch(ROWS, packed=case["packed"]))
    assert_same(actual, reference(config.model, ROWS, packed=case["packed"]))


class TestInterleaved:
    """Four chunks on two stages."""

    config = config_of(schedule="interleaved_1f1b", repeats=2, microbatches=6)

    @pytest.fixture(scope="class")
    def mpmd(self):
        return MpmdUnderTest(self.config)

    def test_interleaved_chunks_equal_sequential(self, mpmd):
        assert_same(mpmd.train(make_batch(ROWS)), reference(self.config.model, ROWS))

    def test_units_run_in_the_order_of_the_table(self, mpmd):
        ran = [[], []]
        mpmd.train(make_batch(ROWS), observe=lambda stage, name, m: ran[stage].append((*name, m)))
        table = mpmd.engine.table
        for stage in range(2):
            expected = {}
            for kind in table.kinds:
                for tick, s, m, chunk in zip(*table.units(kind), strict=True):
                    if s == stage:
                        expected[int(tick)] = (kind, int(table.global_chunk(chunk, s)), int(m))
            assert ran[stage] == [expected[tick] for tick in sorted(expected)]

    def test_live_activations_stay_within_the_peak_of_the_table(self, mpmd):
        """With full rematerialisation a chunk in flight keeps its input, as does one that waits."""
        mpmd.train(make_batch(ROWS))
        shape = (ROWS // 6, 8, 16)
        most = Counter()

        def observe(stage, name, m):
            devices = Counter(
                next(iter(x.devices())).id for x in jax.live_arrays() if x.shape == shape
            )
            for device, count in devices.items():
                most[device] = max(most[device], count)

        mpmd.train(make_batch(ROWS), observe=observe)
        table = mpmd.engine.table
        slots = activation_slots(table)
        assert set(most) == {0, 1}
        peak = simulate(table).peak_in_flight
        for stage in range(2):
            waiting = slots.activations.peak[stage] + slots.gradients.peak[stage]
            assert peak[stage] <= most[stage] <= peak[stage] + waiting

    def test_evaluate_takes_batches_of_any_size_and_length(self, mpmd):
        config = tiny(**{"pipeline.engine": "sequential", "data.global_batch_size": ROWS})
        sequential = EngineUnderTest(dataclasses.replace(config, model=self.config.model))
        for rows, length in ((ROWS, 8), (10, 8), (10, 4)):
            batch = {name: x[:, :length] for name, x in make_batch(rows).items()}
            expected = sequential.evaluate(batch)
            assert mpmd.evaluate(batch) == pytest.approx(expected, rel=1e-5)
