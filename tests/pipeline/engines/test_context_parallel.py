"""Sequences split over mesh axis `context`, in every engine: gradients, evaluation, collectives."""

from functools import cache
from itertools import product

import pytest
from helpers.engines import (
    EngineUnderTest,
    assert_same,
    make_batch,
    on_one_device,
    reference,
    sequential,
    tiny,
    under_test,
)
from helpers.programs import shard_bytes

from maxpipe.compile.collectives import find_collectives
from maxpipe.compile.hlo import parse
from maxpipe.config.sections.parallelism import DEFAULT_RULES

ROWS = 16
STAGES = "stage=2 num_microbatches=4 "
ENGINES = {
    "sequential": "engine=sequential num_microbatches=2",
    "circular": STAGES + "schedule=circular",
    "scheduled": STAGES + "schedule=lockstep_1f1b num_repeats=2",
    "mpmd": STAGES + "schedule=1f1b scan_layers_per_stage=false",
}


def config_of(engine, words, **values):
    """Two segments in each row, two query heads for a key head."""
    return tiny(f"context=2 tie_embeddings=true {ENGINES[engine]} {words}", **values)


@cache
def compiled(engine):
    """Return an engine on 2 sequence parts x 2 FSDP shards, and its collectives by kind."""
    config = config_of(engine, "fsdp=2")
    subject = EngineUnderTest(config)
    module = parse(subject.compile(make_batch(ROWS)).as_text())
    found = find_collectives(module, subject.batch_sharding.mesh)
    return config, subject, {(c.kind, c.axes): c for c in found}


@pytest.mark.parametrize("engine", ["circular", "scheduled"])
def test_equals_one_device(engine):
    config, subject, _ = compiled(engine)
    assert_same(subject.train(make_batch(ROWS)), reference(on_one_device(config), ROWS))


@pytest.mark.parametrize("engine", ["circular", "scheduled"])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(engine):
    _, _, found = compiled(engine)
    layers = 4 * 2 + 1  # M V + S - 1 units of one layer
    # A microbatch has two rows on a device; each has four tokens in two key heads of size four.
    part = 2 * 4 * 2 * 4 * 4
    scattered, gathered = found["reduce-scatter", "context"], found["all-gather", "context"]
    assert scattered.count == 2 * layers
    assert scattered.bytes == 2 * layers * 2 * part
    assert gathered.bytes >= 2 * 2 * layers * part  # forward, and again in the backward


def test_the_scheduled_engine_sums_gradients_over_parts_once():
    _, subject, found = compiled("scheduled")
    summed = sum(
        c.bytes for (kind, axes), c in found.items() if kind == "all-reduce" and "context" in axes
    )
    once = shard_bytes(subject.params)
    assert once <= summed < 2 * once  # tied embeddings twice


GRID = [
    *product(["sequential"], ["", "remat_policy=minimal"]),
    *product(
        ["circular"],
        [
            f"num_repeats=2 fsdp_gather={gather} delay_activation_forwarding={delay}"
            for gather in ("per_iteration", "per_repeat", "once")
            for delay in ("false", "true")
        ]
        + ["num_layers=6 parallel_layers=4"],
    ),
    *product(
        ["scheduled"],
        [
            f"fsdp_gather={gather} skip_idle={skip} delay_activation_forwarding={delay}"
            for gather in ("per_iteration", "once")
            for skip in ("true", "false")
            for delay in ("false", "true")
        ]
        + ["schedule=lockstep_zb remat_policy=minimal"],
    ),
    *product(
        ["mpmd"], [f"schedule={name}" for name in ("1f1b", "zb_h1", "zb_v", "interleaved_1f1b")]
    ),
]
MESHES = {
    "context4": "context=4",
    "fsdp": "fsdp=2 dropout=0.2 remat_policy=none",
    "tensor": "tensor=2 logit_tiles=3 tie_embeddings=false",
    "spread": "fsdp=2",
}
SPREAD = {"embed": ["fsdp", "context"], "outer_embed": ["stage", "fsdp", "context"]}


@pytest.mark.grid
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("engine", "words"), GRID, ids=str)
def test_equals_one_device_in_the_full_product(engine, words, mesh):
    rules = [[name, SPREAD.get(name, axes)] for name, axes in DEFAULT_RULES]
    values = {"sharding.logical_axis_rules": rules} if mesh == "spread" else {}
    config = config_of(engine, f"{MESHES[mesh]} {words}", **values)
    subject, model = under_test(config), on_one_device(config)
    assert_same(subject.train(make_batch(ROWS)), reference(model, ROWS))
    if engine != "mpmd":
        batch = make_batch(ROWS, seed=1)
        expected = sequential(model, ROWS).evaluate(batch)
        assert subject.evaluate(batch) == pytest.approx(expected, rel=1e-5)
