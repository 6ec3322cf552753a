"""Sequences split over mesh axis `context`, in every engine: gradients, evaluation, collectives."""

import dataclasses
from functools import cache
from itertools import product

import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest
from helpers.shard_bytes import shard_bytes

from maxpipe.compile.collectives import find_collectives
from maxpipe.compile.hlo import parse
from maxpipe.config.sections.parallelism import DEFAULT_RULES

ROWS = 16
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
ENGINES = {
    "sequential": {"pipeline.num_microbatches": 2},
    "circular": {**STAGES, "pipeline.schedule": "circular"},
    "scheduled": {**STAGES, "pipeline.schedule": "lockstep_1f1b", "pipeline.num_repeats": 2},
    "mpmd": {**STAGES, "pipeline.schedule": "1f1b", "pipeline.scan_layers_per_stage": False},
}


def config_of(engine, **values):
    """Two segments in each row, two query heads for a key head."""
    common = {"pipeline.engine": engine, "mesh.ici.context": 2, "model.tie_embeddings": True}
    return tiny(**common | ENGINES[engine] | values)


def under_test(config):
    return MpmdUnderTest(config) if config.pipeline.engine == "mpmd" else EngineUnderTest(config)


def check(config, subject=None):
    model = dataclasses.replace(config.model, logit_tiles=1)
    assert_same((subject or under_test(config)).train(make_batch(ROWS)), reference(model, ROWS))


@cache
def compiled(engine):
    """Return an engine on 2 sequence parts x 2 FSDP shards, and its collectives by kind."""
    config = config_of(engine, **{"mesh.ici.fsdp": 2})
    subject = EngineUnderTest(config)
    module = parse(subject.compile(make_batch(ROWS)).as_text())
    found = find_collectives(module, subject.batch_sharding.mesh)
    return config, subject, {(c.kind, c.axes): c for c in found}


@pytest.mark.parametrize("engine", ["circular", "scheduled"])
def test_equals_sequential(engine):
    config, subject, _ = compiled(engine)
    check(config, subject)


def test_equals_sequential_without_stages():
    """A chunk is one token; dropout masks belong to tokens, and tiles of logits to devices."""
    values = {
        "mesh.ici.context": 4,
        "mesh.ici.tensor": 2,
        "model.dropout": 0.2,
        "model.logit_tiles": 2,
    }
    check(config_of("sequential", **values))


def test_equals_sequential_on_meshes_of_their_own():
    check(config_of("mpmd", **{"mesh.ici.fsdp": 2}))


@pytest.mark.parametrize("axis", ["fsdp", pytest.param("data", marks=pytest.mark.slow)])
def test_equals_sequential_with_weights_gathered_once(axis):
    """Microbatches of parts in a program that is manual over the axis."""
    values = {"pipeline.fsdp_gather": "once", "pipeline.num_microbatches": 2}
    check(config_of("circular", **{f"mesh.ici.{axis}": 2}, **values))


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


@pytest.mark.parametrize(
    "values", [{"mesh.ici.tensor": 4}, {"mesh.ici.tensor": 4, "mesh.ici.context": 1}], ids=str
)
def test_more_devices_than_key_heads(values):
    check(config_of("sequential", **values))


GRID = [
    *product(["sequential"], [{}, {"pipeline.remat_policy": "minimal"}]),
    *product(
        ["circular"],
        [
            {
                "pipeline.num_repeats": 2,
                "pipeline.fsdp_gather": gather,
                "pipeline.delay_activation_forwarding": delay,
            }
            for gather in ("per_iteration", "per_repeat", "once")
            for delay in (False, True)
        ]
        + [{"model.num_layers": 6, "pipeline.parallel_layers": 4}],
    ),
    *product(
        ["scheduled"],
        [
            {
                "pipeline.fsdp_gather": gather,
                "pipeline.skip_idle": skip,
                "pipeline.delay_activation_forwarding": delay,
            }
            for gather in ("per_iteration", "once")
            for skip in ("true", "false")
            for delay in (False, True)
        ]
        + [{"pipeline.schedule": "lockstep_zb", "pipeline.remat_policy": "minimal"}],
    ),
    *product(
        ["mpmd"],
        [{"pipeline.schedule": name} for name in ("1f1b", "zb_h1", "zb_v", "interleaved_1f1b")],
    ),
]
MESHES = {
    "context4": {"mesh.ici.context": 4},
    "fsdp": {"mesh.ici.fsdp": 2, "model.dropout": 0.2, "pipeline.remat_policy": "none"},
    "tensor": {"mesh.ici.tensor": 2, "model.logit_tiles": 3, "model.tie_embeddings": False},
    "spread": {
        "mesh.ici.fsdp": 2,
        "sharding.logical_axis_rules": [
            *(rule for rule in DEFAULT_RULES if rule[0] not in ("embed", "outer_embed")),
            ["embed", ["fsdp", "context"]],
            ["outer_embed", ["stage", "fsdp", "context"]],
        ],
    },
}


@pytest.mark.grid
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("engine", "values"), GRID, ids=str)
def test_equals_sequential_in_the_full_product(engine, values, mesh):
    config = config_of(engine, **MESHES[mesh] | values)
    subject = under_test(config)
    check(config, subject)
    if engine != "mpmd":
        batch = make_batch(ROWS, seed=1)
        plain = dataclasses.replace(tiny(**{"pipeline.engine": "sequential"}), model=config.model)
        assert subject.evaluate(batch) == pytest.approx(
            EngineUnderTest(plain).evaluate(batch), rel=1e-5
        )
