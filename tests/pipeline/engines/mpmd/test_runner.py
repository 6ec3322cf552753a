"""Running small sliced programs: sums over microbatches, freed memory, order, transfers."""

from collections import Counter
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.mpmd_programs import assert_computes, chain, inputs, sliced, weights
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary
from maxpipe.pipeline.engines.mpmd.program import UnitName, before, route
from maxpipe.pipeline.engines.mpmd.runner import Runner, execution_order
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.plan.simulate import simulate

S, M = 3, 4


def microbatches():
    return [
        jnp.asarray(np.random.default_rng(m).standard_normal((2, 4)), jnp.float32) for m in range(M)
    ]


class Case:
    def __init__(self, schedule, loss=chain):
        self.table = load_schedule(schedule, S, M, SCHEDULES[schedule].repeats_for(1))
        self.weights = weights(self.table.num_chunks)
        split = "W" in self.table.kinds
        self.program = sliced(loss, self.weights, microbatches()[0], split_backwards=split)
        meshes = [Mesh(np.array([d]), ("stage",)) for d in jax.devices()[:S]]
        self.shardings = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
        sums = [dict.fromkeys(range(1 + len(self.weights)), to) for to in self.shardings]
        self.runner = Runner(self.program, self.table, meshes, self.program.inputs[-1:], sums)

    def run(self, observe=None):
        values = list(zip(self.program.inputs, self.weights, strict=False))
        fixed = [{v: jax.device_put(w, to) for v, w in values} for to in self.shardings]
        varying = [
            [{self.program.inputs[-1]: jax.device_put(x, to)} for x in microbatches()]
            for to in self.shardings
        ]
        start = [
            {i: jax.device_put(jnp.zeros(() if i == 0 else (4, 4)), sharding) for i in outputs}
            for outputs, sharding in zip(self.runner.outputs, self.shardings, strict=True)
        ]
        arrays = [array for stage in start for array in stage.values()]
        return arrays, self.runner.run(fixed, varying, start, observe)


@pytest.fixture(scope="module", params=["1f1b", "zb_h1"])
def case(request):
    return Case(request.param)


def test_run_sums_over_all_microbatches_in_place_and_keeps_no_value(case):
    before = len(jax.live_arrays())
    case.run()
    assert len(jax.live_arrays()) <= before
    start, sums = case.run()
    assert all(array.is_deleted() for array in start)
    expected = [jax.value_and_grad(chain)(weights(), x) for x in microbatches()]
    loss, gradients = jax.tree.map(lambda *parts: sum(parts), *expected)
    np.testing.assert_allclose(sums[2][0], loss, rtol=1e-5)
    for stage, gradient in enumerate(gradients):
        np.testing.assert_allclose(sums[stage][1 + stage], gradient, rtol=1e-4, atol=1e-5)


def test_values_that_die_in_a_unit_are_donated_to_it(case):
    """A backward writes a gradient as large as the one that it reads, which nothing else needs."""
    last = "I" if "W" in case.table.kinds else "B"
    executable = case.runner.executables[UnitName(last, 1)]
    assert executable.donated
    assert not set(executable.donated) & set(executable.retained)
    assert {v.aval.shape for v in executable.donated} == {(2, 4)}
    # Its input is read again by the backward.
    assert not case.runner.executables[UnitName("F", 1)].donated


def test_run_dispatches_units_in_the_order_of_the_table(case):
    seen = []
    case.run(lambda stage, name, m: seen.append((stage, name, m)))
    assert seen == execution_order(case.table)
    assert len(seen) == S * M * len(case.table.kinds)


def checkpointed_chain(w, x):
    x = x.T
    for one in w:
        x = mark_stage_boundary(jax.checkpoint(lambda x, one: jnp.sin(one @ x))(x, one))
    return jnp.sum(x * x)


@pytest.mark.parametrize(
    "schedule", [name for name in SCHEDULES if "mpmd" in SCHEDULES[name].engines]
)
def test_live_activations_stay_within_the_peak_of_the_table(schedule):
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


def skip(w, x):
    first = x = mark_stage_boundary(jnp.sin(x @ w[0]))
    x = mark_stage_boundary(jnp.sin(x @ w[1]))
    x = mark_stage_boundary(jnp.sin(x @ w[2]))
    return jnp.sum(mark_stage_boundary(x @ w[3] * first))


def counts(routes):
    return {str(name): len(values) for name, values in routes.sends.items() if values}


def test_route_of_a_value_for_a_far_stage_passes_the_stages_between():
    program = sliced(skip, weights(4), inputs())
    assert_computes(program, skip, weights(4), inputs())
    # Back from chunk 3 travel the gradients of the activation and of the skipped value.
    expected = {"F0": 1, "F1": 2, "F2": 2, "B3": 2, "B2": 2, "B1": 1}
    assert counts(route(program, [0, 1, 2, 3])) == expected
    # No value is sent to a stage that has it.
    forward = {n: k for n, k in counts(route(program, [0, 1, 1, 0])).items() if n[0] == "F"}
    assert forward == {"F0": 1, "F2": 1}
    assert not counts(route(program, [0] * 4))


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("stages", [[0, 1, 2], [0, 1, 0], [0, 0, 1]], ids=str)
def test_route_brings_each_value_before_its_reads_and_drops_it_afterwards(stages, split):
    program = sliced(chain, weights(), inputs(), split_backwards=split)
    routes = route(program, stages)
    there = [set() for _ in routes.uses]
    left = [{v: len(names) for v, names in uses.items()} for uses in routes.uses]
    for name, computation in program.computations.items():
        stage = stages[name.chunk]
        there[stage].update(computation.writes)
        assert there[stage].issuperset(computation.reads), name
        if routes.sends[name]:
            following = name.chunk + (1 if name.kind == "F" else -1)
            assert there[stage].issuperset(routes.sends[name])
            there[stages[following]].update(routes.sends[name])
        for v, names in routes.uses[stage].items():
            if name in names:
                left[stage][v] -= 1
                if not left[stage][v]:
                    there[stage].discard(v)
    assert not any(there)


def test_before_is_the_order_that_all_schedules_keep():
    """No unit waits for a W."""
    names = [UnitName(*name) for name in (("F", 0), ("F", 1), ("I", 1), ("I", 0), ("W", 0))]
    for (i, first), (j, second) in product(enumerate(names), repeat=2):
        assert before(first, second) == (i <= j)
