"""Residuals in the host's memory: which ones, where they lie, and how many come back at once."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import MpmdUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_programs import chain, inputs, sliced, weights
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import pallas_call

from maxpipe.pipeline.engines.mpmd import runner
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.offloading import (
    UNITS_AHEAD,
    Offloading,
    _names_of,
    named_residuals,
)

ROWS, MICROBATCHES = 16, 4


def config_of(words=""):
    return tiny(
        f"schedule=1f1b remat_policy=minimal_offloaded num_microbatches={MICROBATCHES} stage=2 "
        f"num_layers=2 global_batch_size={ROWS} {words}"
    )


@pytest.fixture
def stored(monkeypatch):
    """{memory kind: shapes and how often they were stored} of all values that a step keeps."""
    shapes = {"device": Counter(), "pinned_host": Counter()}

    class Watched(runner.LiveValues):
        def add(self, values, arrays, microbatch):
            super().add(values, arrays, microbatch)
            for v in values:
                x = self.arrays[v, microbatch]
                shapes[x.sharding.memory_kind][x.shape] += 1

    monkeypatch.setattr(runner, "LiveValues", Watched)
    return shapes


@pytest.fixture
def unfinished(monkeypatch):
    """How many units of a stage may be unfinished, after each that was dispatched."""
    numbers = []

    class Watched(Offloading):
        def dispatched(self, done):
            super().dispatched(done)
            numbers.append(len(self._unfinished))

    monkeypatch.setattr(runner, "Offloading", Watched)
    return numbers


def train(config):
    return MpmdUnderTest(config).train(make_batch(ROWS))


def test_offloaded_residuals_lie_on_the_host_and_the_result_equals_sequential(stored):
    """On the device is what `full` keeps there, on the host what `minimal` keeps besides."""
    config = config_of()
    assert_same(train(config), reference(config.model, ROWS))
    on_device, on_host = (Counter(stored[kind]) for kind in ("device", "pinned_host"))
    for words, expected in (
        ("remat_policy=full", on_device),
        ("remat_policy=minimal", on_device + on_host),
        ("remat_iterations=false", None),  # saves every value
    ):
        for shapes in stored.values():
            shapes.clear()
        train(config_of(words))
        assert not stored["pinned_host"]
        assert expected is None or stored["device"] == expected


def test_offloaded_residuals_of_split_backwards_wait_for_their_weight_gradients(stored, unfinished):
    """Of the seven tensors of a layer that are saved, its I reads six, and its W two."""
    config = config_of("schedule=zb_v num_repeats=2 num_layers=4")
    mpmd = MpmdUnderTest(config)
    assert_same(mpmd.train(make_batch(ROWS)), reference(config.model, ROWS))
    units = mpmd.engine.training.runner.executables
    moved = {str(name): len(units[name].moved) for name in units}
    assert moved == {
        f"{kind}{c}": n for c in range(4) for kind, n in (("F", 7), ("I", 6), ("W", 2))
    }
    assert stored["pinned_host"].total() == 4 * 7 * MICROBATCHES
    assert len(unfinished) == len(moved) * MICROBATCHES
    assert max(unfinished) == UNITS_AHEAD


def test_named_residuals_are_those_that_no_other_chunk_reads():
    def loss(matrices, x):
        first, second, third = matrices
        skip = checkpoint_name(jnp.sin(x @ first), "kept")
        own = checkpoint_name(jnp.sin(skip @ second), "kept")
        y = mark(jnp.sin(own @ third))
        return jnp.sum(mark(jnp.sin(y + skip)))

    program = sliced(loss, weights(), inputs())
    residuals = named_residuals(program, ["kept"])
    forward = next(iter(program.computations.values()))
    assert len(residuals) == 1
    assert residuals < {*forward.writes}
    assert named_residuals(program, ["other"]) == frozenset()
    assert named_residuals(sliced(chain, weights(), inputs()), ["kept"]) == frozenset()


def test_named_residuals_may_come_from_loops_with_a_condition_and_from_kernels():
    def step(state):
        return state[0] + 1, jnp.sin(state[1]), checkpoint_name(jnp.cos(state[2]), "kept")

    def double(x, result):
        result[...] = 2 * x[...]

    def stage(x):
        _, plain, kept = jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x, x))
        kernel = pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
        return plain, kept, kernel(x)

    jaxpr = jax.make_jaxpr(stage)(jnp.ones(2)).jaxpr
    assert [[*_names_of(v, jaxpr.eqns)] for v in jaxpr.outvars] == [[], ["kept"], []]


def test_offloading_waits_for_the_unit_before_the_last(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    (value, other) = sliced(chain, weights(), inputs()).inputs[:2]
    offloading, x = Offloading([value]), jnp.arange(3.0)
    for unit in range(UNITS_AHEAD + 2):
        offloading.wait()
        stored = offloading.away([value, other], [x, x])
        assert [a.sharding.memory_kind for a in stored] == ["pinned_host", "device"]
        assert stored[1] is x
        offloading.dispatched(jnp.full((), unit))
    assert [int(done) for done, _ in waited] == [0, 1]
    assert all(copy.sharding.memory_kind == "pinned_host" for _, copy in waited)
    back = offloading.back([value, other], stored)
    assert [a.sharding.memory_kind for a in back] == ["device", "device"]
    assert back[0].tolist() == x.tolist()
