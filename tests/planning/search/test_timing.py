"""What a step waits for, by closed forms: who sums gradients when, and what the head reads."""

import numpy as np
import pytest
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config
from maxpipe.devices.chips import GIB
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.timing import step_seconds, units_of, waits_of

MACHINE = machine_of("v5p:2x2x2", 1, Config())


@pytest.mark.parametrize(
    ("engine", "schedule", "gather", "grows"),
    [
        ("circular", "circular", "per_iteration", True),
        ("circular", "circular", "once", False),
        ("scheduled", "lockstep_1f1b", "per_iteration", False),
        ("mpmd", "1f1b", "per_iteration", False),
    ],
)
def test_gradients_of_shared_weights_are_summed_in_every_iteration_by_autodiff(
    engine, schedule, gather, grows
):
    """Sequences are so short that only weights take long to send."""
    choices = {"fsdp_gather": [gather], "remat_policy": ["full"], "mesh": {"data": 2}}
    seconds = step_seconds(sizes_of(engine, schedule, **choices), MACHINE)
    eight, sixteen = np.broadcast_to(seconds.communication, (2, 1, 1, 1, 3))[:, 0, 0, 0, 0]
    assert (sixteen > 1.8 * eight) == grows
    assert (sixteen < 1.2 * eight) != grows


@pytest.mark.parametrize(
    ("engine", "schedule", "mesh", "runs", "products"),
    [
        # Every stage has a part of every microbatch's tokens, and all weights.
        ("scheduled", "lockstep_1f1b", {}, 8, 3),
        # Every stage has some microbatches; autodiff computes logits again.
        ("circular", "circular", {}, 2, 4),
        ("sequential", "", {"stage": 1}, 8, 4),
        ("mpmd", "1f1b", {}, 8, 3),
    ],
)
def test_every_tile_of_logits_reads_the_head_and_adds_to_its_gradients(
    engine, schedule, mesh, runs, products
):
    """There are so few tokens that the head's products only wait for its weights."""
    fixed = {"model.vocab_size": 4096, "model.logit_tiles": 16}
    choices = {"num_microbatches": [8], "remat_policy": ["minimal"]}
    sizes = sizes_of(engine, schedule, mesh=mesh, fixed=fixed, **choices)
    times = step_seconds(sizes, MACHINE).products
    one, four, sixteen = np.broadcast_to(times, (1, 1, 1, times.shape[3], 3))[0, 0, 0, 0]
    weights = sizes.parameters.head_gathered
    read = products * sizes.itemsize * weights / MACHINE.hbm
    added = 8 * weights / MACHINE.stream_rate(4)
    assert sixteen - four == pytest.approx(runs * 12 * (read + added))
    # A single tile has nothing to add to, but the sum over microbatches.
    assert four - one == pytest.approx(runs * (3 * read + 4 * added))


@pytest.mark.parametrize(
    ("schedule", "by_layer", "capacity", "same_as"),
    [
        ("lockstep_1f1b", False, 95 * GIB, "false"),
        ("lockstep_1f1b", False, 1.0, "true"),
        ("lockstep_1f1b", True, 95 * GIB, "true"),
        ("lockstep_zb", False, 95 * GIB, "true"),  # its W computes them either way
    ],
)
def test_cheap_values_are_computed_again_as_the_run_decides(schedule, by_layer, capacity, same_as):
    machine = machine_of("v5p:2x2x2", 1, Config())._replace(capacity=capacity)

    def seconds(choice):
        fixed = {
            "model.num_layers": 16,
            "pipeline.remat_cheap": choice,
            "pipeline.scan_layers_per_stage": by_layer,
        }
        sizes = sizes_of("scheduled", schedule, fixed=fixed, remat_policy=["full"])
        return float(np.ravel(units_of(sizes, machine).input_gradient)[0])

    assert seconds("auto") == seconds(same_as)
    if schedule == "lockstep_1f1b" and not by_layer:
        assert seconds("false") < seconds("true")
    else:
        assert seconds("false") == seconds("true")


def test_circular_sums_gradients_over_expert_in_every_iteration_or_once():
    machine = machine_of("v5p:2x2x2", 1, Config())
    experts = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.moe.mlp_dim": 64}
    mesh = {"stage": 2, "data": 1, "expert": 2}

    def waits(gather):
        sizes = sizes_of("circular", "circular", mesh=mesh, fixed=experts, fsdp_gather=[gather])
        return waits_of(sizes, machine)

    each, once = waits("per_iteration"), waits("once")
    assert np.all(each.gradient > 0)
    assert np.all(once.gradient == 0)
    assert np.all(each.reduction < once.reduction)
