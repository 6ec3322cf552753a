"""Running small sliced programs: sums over microbatches, memory given back, order of dispatch."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mpmd_programs import chain, sliced, weights
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.engines.mpmd.runner import Runner, execution_order
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import from_ticks
from maxpipe.planning.simulate import simulate

S, M = 3, 4


def microbatches():
    return [
        jnp.asarray(np.random.default_rng(m).standard_normal((2, 4)), jnp.float32) for m in range(M)
    ]


class Case:
    """A chain of matrix products, one for each chunk, on three devices."""

    def __init__(self, schedule, loss=chain):
        self.table = load_schedule(schedule, S, M, SCHEDULES[schedule].repeats_for(1))
        self.weights = weights(self.table.num_chunks)
        self.program = sliced(
            loss, self.weights, microbatches()[0], split_backwards="W" in self.table.kinds
        )
        self.whole = [
            NamedSharding(Mesh(np.array([d]), ("stage",)), PartitionSpec())
            for d in jax.devices()[:S]
        ]
        sums = [dict.fromkeys(range(1 + len(self.weights)), sharding) for sharding in self.whole]
        meshes = [sharding.mesh for sharding in self.whole]
        self.runner = Runner(self.program, self.table, meshes, self.program.inputs[-1:], sums)

    def run(self, observe=None):
        """(the arrays that sums started from, the sums)."""
        values = list(zip(self.program.inputs, self.weights, strict=False))
        fixed = [{v: jax.device_put(w, to) for v, w in values} for to in self.whole]
        varying = [
            [{self.program.inputs[-1]: jax.device_put(x, to)} for x in microbatches()]
            for to in self.whole
        ]
        start = [
            {i: jax.device_put(jnp.zeros(() if i == 0 else (4, 4)), sharding) for i in outputs}
            for outputs, sharding in zip(self.runner.outputs, self.whole, strict=True)
        ]
        given = [array for stage in start for array in stage.values()]
        return given, self.runner.run(fixed, varying, start, observe)


@pytest.fixture(scope="module", params=["1f1b", "zb_h1"])
def case(request):
    return Case(request.param)


def test_sums_are_those_of_all_microbatches(case):
    _, sums = case.run()
    expected = [jax.value_and_grad(chain)(weights(), x) for x in microbatches()]
    loss, gradients = jax.tree.map(lambda *parts: sum(parts), *expected)
    np.testing.assert_allclose(sums[2][0], loss, rtol=1e-5)
    for stage, gradient in enumerate(gradients):
        np.testing.assert_allclose(sums[stage][1 + stage], gradient, rtol=1e-4, atol=1e-5)


def test_gradients_are_added_in_place(case):
    given, _ = case.run()
    assert all(array.is_deleted() for array in given)


def test_what_dies_in_a_unit_is_given_to_it(case):
    """A backward writes a gradient as large as the one that it reads, which nothing else needs."""
    last = "I" if "W" in case.table.kinds else "B"
    executable = case.runner.executables[UnitName(last, 1)]
    assert executable.donated
    assert not set(executable.donated) & set(executable.retained)
    assert {v.aval.shape for v in executable.donated} == {(2, 4)}
    assert not case.runner.executables[
        UnitName("F", 1)
    ].donated  # its input is read again by the backward


def test_nothing_is_alive_behind_the_last_unit(case):
    before = len(jax.live_arrays())
    case.run()
    assert len(jax.live_arrays()) <= before


def test_units_are_dispatched_in_the_order_of_the_table(case):
    seen = []
    case.run(lambda stage, name, m: seen.append((stage, name, m)))
    assert seen == execution_order(case.table)
    assert len(seen) == S * M * len(case.table.kinds)


def checkpointed_chain(w, x):
    """Activations have another shape than the microbatch."""
    x = x.T
    for one in w:
        x = mark_stage_boundary(jax.checkpoint(lambda x, one: jnp.sin(one @ x))(x, one))
    return jnp.sum(x * x)


@pytest.mark.parametrize(
    "schedule", [name for name in SCHEDULES if "mpmd" in SCHEDULES[name].engines]
)
def test_no_more_activations_are_alive_than_the_table_says(schedule):
    """A chunk in flight is its input, and until its W a gradient; others wait for their turn."""
    case, most = Case(schedule, checkpointed_chain), Counter()

    def observe(stage, name, m):
        alive = Counter(next(iter(x.devices())).id for x in jax.live_arrays() if x.shape == (4, 2))
        for device, count in alive.items():
            most[device] = max(most[device], count)

    case.run(observe)
    slots, peak = activation_slots(case.table), simulate(case.table).peak_in_flight
    kept = 2 if "W" in case.table.kinds else 1
    for stage in range(S):
        waiting = slots.activations.peak[stage] + slots.gradients.peak[stage]
        assert 0 < most[stage] <= kept * peak[stage] + waiting


def test_a_whole_backward_in_a_split_table_is_both_halves():
    ticks = {"F": [[0], [1]], "B": [[2], [-1]], "I": [[-1], [3]], "W": [[-1], [4]]}
    table = from_ticks("mixed", 1, 1, {kind: np.array(tick) for kind, tick in ticks.items()})
    names = [(str(name), m) for _, name, m in execution_order(table)]
    assert names == [("F0", 0), ("F0", 1), ("I0", 0), ("W0", 0), ("I0", 1), ("W0", 1)]
