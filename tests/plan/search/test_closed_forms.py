"""The closed forms of many candidates are those of one; patterns are those of whole tables."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.engines import keys

from maxpipe.config import Config, replace, resolve
from maxpipe.config.options import update
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.plan.auto_stages import predict
from maxpipe.plan.choices import GATHER as GATHER_MODE
from maxpipe.plan.choices import gathers_in_steps, with_gather_mode
from maxpipe.plan.estimate import estimate
from maxpipe.plan.footprint import on_platform
from maxpipe.plan.search.best import priced_configuration
from maxpipe.plan.search.block import block_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import machine_of, platform_of
from maxpipe.plan.search.patterns import FIRST_STAGE, pattern
from maxpipe.plan.search.pricing import Outcome, price, priced_blocks, search
from maxpipe.plan.search.request import placed
from maxpipe.plan.search.space import Space
from maxpipe.plan.simulate import Costs, simulate

SIZES = keys(
    "num_layers=8 embed_dim=64 num_query_heads=8 num_kv_heads=4 head_dim=8 mlp_dim=128 "
    "sequence_length=64 global_batch_size=32"
) | {"eval.every": 0, "compile.topology": "v6e:2x4"}


@pytest.fixture(scope="module")
def config():
    return replace(Config(), **SIZES)


@pytest.fixture(scope="module")
def facts(config):
    return Facts(config)


def block_on(config, engine, schedule, **sizes):
    space = Space(config, 8, 1, {})
    grid = next(g for g in space.grids() if all(g.size(a) == n for a, n in sizes.items()))
    return block_of(space, grid, engine, schedule, 32)


def test_memory_of_many_is_the_estimate_of_each(config, facts):
    machine, draw = machine_of("v6e:2x4", 1, config), np.random.default_rng(3)
    choices = {"pipeline.engine": ["sequential", "circular", "scheduled"]}
    space = Space(config, 8, 1, choices, is_tpu=True)
    priced = [*priced_blocks(space, machine, facts, [32], Outcome())]
    assert {each.block.engine for each in priced} == {*choices["pipeline.engine"]}
    for number in draw.choice(len(priced), 12, replace=False):
        each = priced[number]
        (candidate,) = each.candidates([draw.integers(len(each.block))], facts)
        resolved = resolve(candidate.config(config), 8, 1)
        expected = estimate(resolved, machine.tpu).total
        assert candidate.memory == pytest.approx(expected, rel=1e-9), candidate.updates()


def test_modes_of_gathers_are_tried_where_they_differ(config):
    for engine, schedule, dtype, axes in (
        # It sums up gradients as often.
        ("circular", "circular", "bfloat16", ("fsdp", "data", "context")),
        ("scheduled", "lockstep_1f1b", "float32", ("stage",)),  # which share the head
        ("mpmd", "1f1b", "float32", ("fsdp",)),
        ("mpmd", "1f1b", "bfloat16", ("stage",)),  # whose units cast weights
    ):
        config = update(config, {"model.dtype": dtype})
        space = Space(config, 8, 1, {})
        grids = [grid for grid in space.grids() if grid.size("stage") == 2]
        for grid in grids:
            differ = any(grid.size(axis) > 1 for axis in axes)
            offered = block_of(space, grid, engine, schedule, 32).gathers
            others = ("per_repeat", "once") if engine == "circular" else ("once",)
            assert offered == ("per_iteration", *(others if differ else ()))
        assert {grid.size("fsdp") for grid in grids} == {1, 2, 4}, (engine, schedule)


@pytest.mark.parametrize(
    ("schedule", "engine", "repeats"),
    [
        ("lockstep_1f1b", "scheduled", 2),
        ("lockstep_zb", "scheduled", 2),
        ("1f1b", "mpmd", 1),
        ("interleaved_1f1b", "mpmd", 2),
        ("zb_v", "mpmd", 2),
    ],
)
def test_pattern_of_many_microbatches_is_that_of_the_whole_table(
    schedule, engine, repeats, monkeypatch
):
    stages, loaded = 4, []

    def load(name, stages, microbatches, *sizes, **options):
        loaded.append(microbatches)
        return load_schedule(name, stages, microbatches, *sizes, **options)

    monkeypatch.setattr("maxpipe.plan.search.patterns.load_schedule", load)
    forwards = Costs(forward=1.0, backward=0.0, input_gradient=0.0, weight_gradient=0.0)
    for many in (20, 33, 34, 35):
        loaded.clear()
        extrapolated = pattern(schedule, engine, stages, many, repeats)
        assert max(loaded, default=0) < many  # whole tables of many microbatches are slow
        table = load_schedule(schedule, stages, many, repeats)
        if engine == "mpmd":
            run = simulate(table, Costs())
            assert extrapolated.idle == pytest.approx(run.makespan - run.work.max())
            saved, handed_over, *_ = extrapolated.in_flight[:, FIRST_STAGE]
            assert (saved + handed_over).max() == run.peak_in_flight[0]
        else:
            makespan = simulate(table, forwards).makespan
            assert extrapolated.idle_forward == makespan - many * repeats


def test_every_candidate_is_kept_priced_or_counted_as_fallen(config, facts):
    choices = {"pipeline.schedule": ["lockstep_1f1b", "circular", "1f1b"]}
    space, machine = Space(config, 8, 1, choices), machine_of("v5p:2x2x2", 1, config)
    everything = search(space, machine, facts, [32], None)
    nothing = search(space, machine, facts, [32], 0.0)
    fell = "memory: more than the limit"
    assert fell not in everything.fallen
    assert not nothing.fitting
    assert nothing.tried == everything.tried == nothing.fallen.total()
    assert nothing.fallen[fell] == everything.tried - everything.fallen.total()
    orders = [candidate.order for candidate in everything.fitting]
    assert orders == sorted(orders)


def test_without_a_limit_of_memory_the_smallest_of_those_nearly_as_fast_is_kept(config, facts):
    space, machine = Space(config, 8, 1, {}), machine_of("cpu:8", 1, config)

    def first_of_blocks(limit):
        fitting = search(space, machine, facts, [32], limit).fitting
        return {(c.grid, c.engine, c.schedule, c.scans): c for c in reversed(fitting)}

    small, fast = first_of_blocks(None), first_of_blocks(1e15)
    assert small.keys() == fast.keys()
    for block, candidate in small.items():
        assert candidate.memory <= fast[block].memory
        assert candidate.per_sequence <= 1.01 * fast[block].per_sequence
    assert any(c.memory < 0.9 * fast[block].memory for block, c in small.items())


def test_own_configuration_is_priced_with_the_gather_mode_that_auto_takes():
    values = {"pipeline.schedule": "lockstep_1f1b", "mesh.ici.stage": 2, "mesh.ici.fsdp": 4}

    def priced(mode):
        config = resolve(replace(Config(), **SIZES, **values, **{"pipeline.fsdp_gather": mode}), 8)
        request = SimpleNamespace(machine=machine_of("v5p:2x2x2", 1, config))
        return priced_configuration(config, request)

    auto, once, iteration = map(priced, ("auto", "once", "per_iteration"))
    assert auto.gather == once.gather == "once"
    assert float(auto.seconds.step) == float(once.seconds.step) != float(iteration.seconds.step)


def test_own_configuration_with_uneven_chunks_needs_the_memory_of_the_largest():
    machine = machine_of("v6e:2x4", 1, replace(Config(), **SIZES))

    def priced(schedule, chunks):
        values = {"pipeline.schedule": schedule, "mesh.ici.stage": 4, "mesh.ici.fsdp": 2}
        config = resolve(replace(Config(), **{**SIZES, **values, **chunks}), 8)
        return config, priced_configuration(config, SimpleNamespace(machine=machine))

    for schedule, chunks in (
        ("lockstep_1f1b", {"pipeline.layers_per_stage": [4, 2, 1, 1]}),
        ("1f1b", {"pipeline.layers_per_stage": [5, 1, 1, 1]}),
        ("1f1b", {"pipeline.parallel_layers": 4}),
    ):
        config, own = priced(schedule, chunks)
        assert update(config, own.layout) == config, chunks  # the user's own stages
        # Of one program all stages hold as many, of several the fullest decides.
        chosen = on_platform(with_gather_mode(config, machine.tpu), "tpu")
        if config.pipeline.engine == "scheduled":
            known = estimate(chosen, machine.tpu).total
        else:
            known = predict(chosen, on_tpus=True).memory.max()
        assert own.memory == pytest.approx(known, rel=0.01), chunks


def test_a_plan_gathers_in_steps_on_some_tpus_alone_as_a_run_does(config):
    for topology, does in (("v6e:2x4", True), ("v5e:2x4", False), ("H100:8", False)):
        machine = machine_of(topology, 1, config)
        there = placed(config, machine)
        block = block_on(there, "scheduled", "lockstep_1f1b", stage=2, fsdp=4)
        facts = Facts(there)
        priced = price(block, Legality(there), facts, machine, Outcome().fallen)
        (found,) = priced.candidates([0], facts)
        resolved = update(resolve(found.config(there), 8, 1), {GATHER_MODE: "per_iteration"})
        assert gathers_in_steps(resolved, machine.tpu) is does, topology
        expected = estimate(on_platform(resolved, platform_of(there)), machine.tpu).total
        assert found.memory == pytest.approx(expected, rel=1e-9), topology
