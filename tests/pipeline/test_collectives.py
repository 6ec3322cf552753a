"""Collectives that compiled steps execute, and the memory of gathered weights."""

import math
from functools import cache

import jax
import pytest
from collectives import executed
from engines import PipelineUnderTest, make_batch, tiny

ROWS = 32
# Query, key, value, out, gate, up and down of one layer; float32.
WEIGHTS = ((24, 6, 4), (24, 3, 4), (24, 3, 4), (6, 4, 24), (24, 40), (24, 40), (40, 24))
SET_BYTES = 4 * sum(map(math.prod, WEIGHTS))


@cache
def compiled(gather, repeats=2, microbatches=8):
    """The step of four stages x two FSDP shards, a layer per stage and repeat."""
    config = tiny(
        **{
            "pipeline.engine": "circular",
            "pipeline.fsdp_gather": gather,
            "pipeline.num_repeats": repeats,
            "pipeline.num_microbatches": microbatches,
            "model.num_layers": 4 * repeats,
            "model.embed_dim": 24,
            "model.num_query_heads": 6,
            "model.num_kv_heads": 3,
            "model.mlp_dim": 40,
            "data.global_batch_size": ROWS,
            "mesh.ici.stage": 4,
            "mesh.ici.fsdp": 2,
        }
    )
    subject = PipelineUnderTest(config)
    batch = {name: jax.device_put(x, subject.batch_sharding) for name, x in make_batch(ROWS).items()}
    step = jax.jit(subject.pipeline.loss_and_gradients)
    return step.lower(subject.params, batch, jax.random.key(0)).compile()


def sets_moved(program, *kinds):
    """Whole weights of a stage that a device gathers, or whole gradients that it reduces, in sets of one layer."""
    total = 0
    for collective, count in executed(program.as_text()).items():
        if collective.kind in kinds and _is_weight(collective.shape):
            # The result of a reduce-scatter is one of two shards.
            total += count * collective.bytes * (2 if collective.kind == "reduce-scatter" else 1)
    return total / SET_BYTES


def _is_weight(shape):
    """Whether the dimensions, but for leading 1s and repeats, are those of a weight or of its FSDP shard."""
    sizes = sorted(n for n in shape if n > 1)
    whole = [sorted(weight) for weight in WEIGHTS]
    shards = [sorted([12, *(n for n in weight if n != 24)]) for weight in WEIGHTS]
    return any(sizes in (dims, sorted([*dims, n])) for dims in whole + shards for n in (2, 4))


@pytest.mark.parametrize(("repeats", "microbatches"), [(2, 8), (4, 8)])
def test_gathers_per_iteration_repeat_or_step(repeats, microbatches):
    gathered = {
        gather: sets_moved(compiled(gather, repeats, microbatches), "all-gather")
        for gather in ("per_iteration", "per_repeat", "once")
    }
    # Forward and backward each gather; the compiler may find that both gather the same.
    assert gathered["per_iteration"] == 2 * (microbatches * repeats + 3)
    assert gathered["per_repeat"] in (repeats, 2 * repeats)
    assert gathered["once"] in (repeats, 2 * repeats)  # in one collective


@pytest.mark.parametrize(("repeats", "microbatches"), [(2, 8), (4, 8)])
def test_gradients_are_reduced_per_iteration_repeat_or_step(repeats, microbatches):
    reduced = {
        gather: sets_moved(compiled(gather, repeats, microbatches), "all-reduce", "reduce-scatter")
        for gather in ("per_iteration", "per_repeat", "once")
    }
    assert reduced["per_iteration"] == microbatches * repeats + 3
    assert reduced["per_repeat"] == repeats
    assert reduced["once"] == repeats


@pytest.mark.parametrize(("gather", "times"), [("per_repeat", 4), ("once", 1)])
def test_number_of_reductions(gather, times):
    """Of each weight: as many as repeats, or one for all of them."""
    counts = executed(compiled(gather, 4).as_text())
    assert {n for c, n in counts.items() if c.kind == "reduce-scatter" and c.shape[-3:] == (12, 6, 4)} == {times}


def test_per_repeat_gathers_at_most_a_quarter_of_the_bytes():
    per_iteration, per_repeat = (
        sets_moved(compiled(gather), "all-gather") for gather in ("per_iteration", "per_repeat")
    )
    assert 0 < per_repeat <= per_iteration / 4


@pytest.mark.parametrize("repeats", [2, 4])
def test_per_repeat_takes_no_more_memory_than_two_gathered_repeats(repeats):
    per_iteration, per_repeat = (
        compiled(gather, repeats).memory_analysis().temp_size_in_bytes for gather in ("per_iteration", "per_repeat")
    )
    assert per_repeat - per_iteration <= 2 * SET_BYTES
