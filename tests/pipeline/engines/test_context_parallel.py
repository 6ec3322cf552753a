"""Sequences split over mesh axis `context`: how often what is gathered and summed."""

from functools import cache

import pytest
from helpers.engines import EngineUnderTest, make_batch, tiny
from helpers.programs import shard_bytes

from maxpipe.compile.collectives import find_collectives
from maxpipe.compile.hlo import parse

ENGINES = {"circular": "schedule=circular", "scheduled": "schedule=lockstep_1f1b num_repeats=2"}
MARKED = ["scheduled", pytest.param("circular", marks=pytest.mark.slow)]


@cache
def compiled(engine, strategy="gather"):
    words = f"context_strategy={strategy} context=2 fsdp=2 stage=2 num_microbatches=4 "
    words += "tie_embeddings=true"
    subject = EngineUnderTest(tiny(f"{words} {ENGINES[engine]}"))
    module = parse(subject.compile(make_batch(16)).as_text())
    found = find_collectives(module, subject.batch_sharding.mesh)
    return subject, {(c.kind, c.axes): c for c in found}


@pytest.mark.parametrize("engine", MARKED)
def test_keys_and_values_are_gathered_and_their_gradients_scattered(engine):
    _, found = compiled(engine)
    layers = 4 * 2 + 1  # M V + S - 1 units of one layer
    # A microbatch has two rows on a device; each has four tokens in two key heads of size four.
    part = 2 * 4 * 2 * 4 * 4
    scattered, gathered = found["reduce-scatter", "context"], found["all-gather", "context"]
    assert scattered.count == 2 * layers
    assert scattered.bytes == 2 * layers * 2 * part
    assert gathered.bytes >= 2 * 2 * layers * part  # forward, and again in the backward


def test_the_scheduled_engine_sums_gradients_over_parts_once():
    subject, found = compiled("scheduled")
    summed = sum(
        c.bytes for (kind, axes), c in found.items() if kind == "all-reduce" and "context" in axes
    )
    once = shard_bytes(subject.params)
    assert once <= summed < 2 * once  # tied embeddings twice


@pytest.mark.parametrize("engine", MARKED)
def test_keys_and_values_go_around_a_ring_and_their_gradients_with_them(engine):
    _, found = compiled(engine, "ring")
    layers = 4 * 2 + 1
    part = 2 * 4 * 2 * 4 * 4  # as above
    # Keys, values and segment ids of two rows of four tokens: forward, and again in the backward.
    # The other device adds to the gradients of both, and sends them back.
    around = 2 * (2 * part + 2 * 4 * 4) + 2 * 2 * part
    assert found["collective-permute", "context"].bytes == layers * around
    assert ("reduce-scatter", "context") not in found
    gathered = found.get(("all-gather", "context"))
    assert gathered is None or gathered.bytes < part
