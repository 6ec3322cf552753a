"""The mpmd engine: gradients of one device, programs compiled once, weights not cast early."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import MpmdUnderTest, assert_equals_one_device, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.config.catalog import SCHEDULES, RematPolicy
from maxpipe.config.options import update
from maxpipe.pipeline.chunk import checkpoint
from maxpipe.pipeline.engines.mpmd import runner, staged
from maxpipe.pipeline.engines.mpmd.model import without_early_cast
from maxpipe.pipeline.engines.mpmd.staged import UnitCompiler
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.plan.simulate import Costs
from maxpipe.plan.solve import Task, solve

ROWS = 48


def config_of(words="", **values):
    common = "schedule=1f1b stage=2 num_microbatches=4 num_layers=2 z_loss=0.01 "
    return tiny(f"{common} global_batch_size={ROWS} {words}", **values)


def test_chunks_that_differ_only_in_their_devices_are_compiled_once():
    """All four stages have two devices; the ends have the embedding and the head."""
    engine = MpmdUnderTest(config_of("stage=4 fsdp=2 num_layers=4")).engine
    units = {str(unit.name): unit for unit in engine.compile()}
    assert {unit.stage for unit in units.values()} == {0, 1, 2, 3}
    for kind in ("F", "B"):
        compiled = [units[f"{kind}{chunk}"].compiled for chunk in range(4)]
        assert compiled[1] is compiled[2]
        assert len({*map(id, compiled)}) == 3


def test_programs_compiled_for_other_devices_are_those_of_the_stages():
    engine = MpmdUnderTest(config_of("fsdp=2")).engine
    first = engine.meshes[0].devices
    own = list(engine.compile())
    assert {d for unit in own for d in devices_of(unit)} > set(first.flat)
    other = list(engine.compile(meshes=[engine.meshes[0]] * 2))
    assert {d for unit in other for d in devices_of(unit)} == set(first.flat)
    assert [unit.name for unit in other] == [unit.name for unit in own]


def test_programs_for_other_devices_lay_out_what_the_stages_own_processes_send(monkeypatch):
    """Both stages of this process stand for those of two, which have the devices' numbers."""
    engine = MpmdUnderTest(config_of("fsdp=2")).engine
    monkeypatch.setattr(staged, "processes_of", lambda mesh: frozenset([mesh.devices.flat[0].id]))
    seen = []
    monkeypatch.setattr(runner, "sent_spec", lambda *value: seen.append(value) or P("fsdp"))
    engine.training.placed_on([engine.meshes[0]] * 2)
    assert seen


def devices_of(unit):
    return [d for s in jax.tree.leaves(unit.compiled.input_shardings) for d in s.device_set]


def devices_at(*places):
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


def test_table_that_was_solved_equals_one_device(tmp_path):
    """Its backwards are of both forms, B, and I with W."""
    task = Task(2, 4, 1, "loop", False, 3, Costs(1, 2, 1.4, 0.9, 0.05))
    table = solve(task, 0, lambda *state: None).run.table
    assert table.kinds == ("F", "B", "I", "W")
    path = tmp_path / "best.csv"
    path.write_text(to_csv(table))
    words = "engine=mpmd num_repeats=1 num_layers=4 remat_policy=minimal"
    assert_equals_one_device(config_of(words, **{"pipeline.schedule": str(path)}))


@pytest.mark.parametrize(
    "words",
    [
        "schedule=zb_h2",
        pytest.param("schedule=zb_v num_repeats=2 num_layers=4", marks=pytest.mark.slow),
    ],
)
def test_order_that_follows_unit_times_equals_one_device(words):
    config = config_of(f"{words} tie_embeddings=true remat_policy=minimal")
    timed = update(config, {"pipeline.unit_times": [1.0, 1.4, 0.9, 0.5, 0.7]})
    assert to_csv(build_table(timed)) != to_csv(build_table(config))
    assert_equals_one_device(timed)


REPEATS = {
    name: (1, 2) if name == "interleaved_1f1b" else (facts.repeats_for(2),)
    for name, facts in SCHEDULES.items()
    if "mpmd" in facts.engines
}
REMAT = ("remat_policy=full", "remat_policy=minimal remat_layers=true", "remat_policy=none")


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
        itertools.product(("false", "true"), (0.0, 0.2), (True, False), (False, True), REMAT)
    )
    for (name, S, V, M), chosen in zip(sizes, options, strict=False):
        tied, dropout, packed, uneven, remat = chosen
        chunks = [1 + (c % 3 == 1 and uneven) for c in range(S * V)]
        layers = f"num_layers={sum(chunks)} layers_per_stage={chunks}".replace(", ", ",")
        words = f"schedule={name} stage={S} num_repeats={V} num_microbatches={M} {remat} "
        words += f"tie_embeddings={tied} dropout={dropout} {layers}"
        yield pytest.param(words, packed, id=f"{name}-S{S}-V{V}-M{M}")


@pytest.mark.grid
@pytest.mark.parametrize(("words", "packed"), product())
def test_full_product_equals_one_device(words, packed):
    assert_equals_one_device(config_of(words), packed=packed)


WEIGHT, X = jnp.ones((4, 4), jnp.float32), jnp.ones((2, 4), jnp.bfloat16)


def product(weight, x):
    return x @ without_early_cast(weight, jnp.bfloat16).astype(jnp.bfloat16)


def test_weight_that_is_cast_has_a_barrier_before_and_its_gradient_has_none():
    assert "barrier" not in str(jax.make_jaxpr(product)(WEIGHT.astype(jnp.bfloat16), X))
    forward = str(jax.make_jaxpr(product)(WEIGHT, X))
    assert forward.index("optimization_barrier") < forward.index("convert_element_type")
    _, backward = jax.vjp(product, WEIGHT, X)
    assert "optimization_barrier" not in str(jax.make_jaxpr(backward)(X))


def test_backward_of_a_layer_that_saves_everything_applies_the_barrier_again():
    layer = checkpoint(product, RematPolicy(everything=True))
    residuals = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(layer, *args)[1]))(WEIGHT, X)
    weights = [v for v in residuals.jaxpr.outvars if v.aval.shape == WEIGHT.shape]
    assert weights
    assert all(v in residuals.jaxpr.invars for v in weights)
