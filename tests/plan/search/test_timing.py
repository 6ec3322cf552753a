"""The step by closed forms: who sums gradients when, and what the head reads."""

import numpy as np
import pytest
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config
from maxpipe.plan.search import timing
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.timing import step_seconds
from maxpipe.plan.search.unit_seconds import units_of
from maxpipe.plan.search.waits import waits_of

MACHINE = machine_of("v5p:2x2x2", 1, Config())


def test_gradients_of_shared_weights_are_summed_in_every_iteration_by_autodiff():
    """Sequences are so short that only weights take long to send."""
    for engine, schedule, gather, grows in (
        ("circular", "circular", "per_iteration", True),
        ("circular", "circular", "once", False),
        ("scheduled", "lockstep_1f1b", "per_iteration", False),
        ("mpmd", "1f1b", "per_iteration", False),
    ):
        choices = {"fsdp_gather": [gather], "remat_policy": ["full"], "mesh": {"data": 2}}
        seconds = step_seconds(sizes_of(engine, schedule, **choices), MACHINE)
        eight, sixteen = np.broadcast_to(seconds.communication, (2, 1, 1, 1, 3))[:, 0, 0, 0, 0]
        assert (sixteen > 1.8 * eight) == grows, (engine, schedule)
        assert (sixteen < 1.2 * eight) != grows, (engine, schedule)


def test_every_tile_of_logits_reads_the_head_and_adds_to_its_gradients():
    """There are so few tokens that the head's products only wait for its weights.

    These are the embedding's where both are tied.
    """
    for engine, schedule, mesh, runs, products in (
        # Every stage has a part of every microbatch's tokens, and all weights.
        ("scheduled", "lockstep_1f1b", {}, 8, 3),
        # Every stage has some microbatches, and computes logits again.
        ("circular", "circular", {}, 2, 4),
        ("sequential", "", {"stage": 1}, 8, 3),
        # One of four stages has all of it, and the parts are means.
        ("mpmd", "1f1b", {}, 2, 3),
    ):
        for is_tied in (False, True):
            fixed = {
                "model.vocab_size": 4096,
                "model.logit_tiles": 16,
                "model.tie_embeddings": is_tied,
            }
            choices = {"num_microbatches": [8], "remat_policy": ["minimal"]}
            sizes = sizes_of(engine, schedule, mesh=mesh, fixed=fixed, **choices)
            times = step_seconds(sizes, MACHINE).products
            one, four, sixteen = np.broadcast_to(times, (1, 1, 1, times.shape[3], 3))[0, 0, 0, 0]
            # As many as the program multiplies each token with, and untied ones come with a norm.
            norm = 0 if is_tied else sizes.config.model.embed_dim
            weights = sizes.facts.head_flops / 2 + norm
            read = products * sizes.itemsize * weights / MACHINE.hbm
            added = 8 * weights / MACHINE.stream_rate(4)
            assert sixteen - four == pytest.approx(runs * 12 * (read + added)), (engine, schedule)
            # A single tile has nothing to add to, but the sum over microbatches.
            assert four - one == pytest.approx(runs * (3 * read + 4 * added)), (engine, schedule)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_lockstep_waits_for_transfers_that_take_longer_than_units(is_delayed, monkeypatch):
    """Activations have a backward to travel in and gradients a forward, or each a whole tick."""
    fixed = {"pipeline.delay_activation_forwarding": is_delayed}
    choices = {"num_microbatches": [16], "num_repeats": [2], "remat_policy": ["minimal"]}
    sizes = sizes_of("scheduled", "lockstep_1f1b", fixed=fixed, **choices)
    waits, tick = waits_of(sizes, MACHINE), sizes.layers * units_of(sizes, MACHINE).layer

    def waiting(permute):
        slow = waits._replace(permute=permute)
        monkeypatch.setattr(timing, "waits_of", lambda sizes, machine: slow)
        seconds = step_seconds(sizes, MACHINE).communication
        return float(np.ravel(seconds - sizes.of_pattern("transfers") * permute)[0])

    unhidden = 0.0 if is_delayed else 32 * float(np.ravel(tick)[0])
    assert waiting(tick) - waiting(0.0 * tick) == pytest.approx(unhidden, abs=1e-12)
    # Of both transfers nothing more is hidden.
    more = waiting(2 * tick) - waiting(tick)
    assert more == pytest.approx(2 * 32 * float(np.ravel(tick)[0]))


def test_layers_outside_a_pipeline_are_divided_among_the_stages_by_sequences():
    """Of four, two and one sequences a device on four stages."""
    for engine, schedule, shares in (
        ("scheduled", "lockstep_1f1b", [1 / 4, 1 / 2, 1]),  # sequences are not divided
        ("circular", "circular", [1 / 4, 1 / 4, 1 / 4]),
        ("mpmd", "1f1b", [1 / 4, 1 / 4, 1 / 4]),  # on one stage, while the others are idle
    ):
        microbatches = [8, 16, 32]
        sizes = sizes_of(engine, schedule, num_microbatches=microbatches, remat_policy=["full"])
        with_outside = sizes.block._replace(outside=np.array([2]))
        without, with_two = (
            step_seconds(each, MACHINE).products[:, 0, 0, 0, 0]
            for each in (sizes, BlockSizes(with_outside, sizes.facts, None))
        )
        layer = units_of(sizes, MACHINE).layer[:, 0, 0, 0, 0]
        expected = 2 * layer * np.array(microbatches) * shares
        if engine != "mpmd":
            # The update of a row of two layers: parameters, two moments, gradients.
            row = 2 * sizes.parameters.layer_at_rest
            expected = expected + (2 * 12 + 4) * row / MACHINE.stream_rate(4)
        np.testing.assert_allclose(with_two - without, expected)
