"""Times of units by closed forms: what a backward computes again."""

import itertools

import numpy as np
import pytest
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config, ConfigError, resolve
from maxpipe.devices.chips import GIB
from maxpipe.plan.remat_cheap import with_remat_cheap
from maxpipe.plan.search.candidate import candidate_of
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.seconds import Seconds
from maxpipe.plan.search.traffic import residual_seconds
from maxpipe.plan.search.unit_seconds import units_of


@pytest.mark.parametrize(
    ("engine", "schedule", "policy"),
    [
        ("scheduled", "lockstep_1f1b", "full"),
        ("scheduled", "lockstep_1f1b", "none"),
        ("scheduled", "lockstep_zb", "minimal"),
        ("circular", "circular", "minimal"),
    ],
)
def test_cheap_values_are_computed_again_as_the_configuration_decides(engine, schedule, policy):
    """Chunks of one layer and of four, loops, and devices that are full or nearly empty."""
    compared = 0
    plain = {"pipeline.scan_layers_per_stage": False, "pipeline.remat_layers": False}
    loop, by_layer = ({**plain, key: True} for key in plain)
    for layers, options, capacity in itertools.product(
        (4, 16), (plain, loop, by_layer), (95 * GIB, 2e6)
    ):
        machine = machine_of("v5p:2x2x2", 1, Config())._replace(capacity=capacity)

        def seconds_of(choice, fixed=options | {"model.num_layers": layers}, machine=machine):
            fixed = fixed | {"pipeline.remat_cheap": choice}
            sizes = sizes_of(engine, schedule, fixed=fixed, remat_policy=[policy])
            return float(np.ravel(units_of(sizes, machine).input_gradient)[0]), sizes

        seconds, sizes = seconds_of("auto")
        nothing = np.zeros(sizes.block.shape).ravel()
        no_seconds = Seconds(nothing, nothing, nothing)
        candidate = candidate_of(sizes.block, 0, nothing, no_seconds, sizes.facts)
        try:
            config = resolve(candidate.config(sizes.config), 8, 1)
        except ConfigError:  # nothing is computed again, so that it cannot be by layer
            continue
        decided = with_remat_cheap(config, machine.tpu).pipeline.remat_cheap
        assert seconds == seconds_of(decided)[0], (layers, options, capacity)
        compared += 1
    assert compared >= 4


def test_attention_computes_the_masked_half_of_the_blocks_on_the_diagonal():
    machine = machine_of("v5p:2x2x2", 1, Config())

    def forward(block):
        fixed = {"data.sequence_length": 1024, "model.attention_block_size": block}
        fixed |= {"compile.topology": "v5p:2x2x2", "model.head_dim": 128}
        sizes = sizes_of("sequential", "", mesh={"stage": 1}, fixed=fixed)
        return float(np.ravel(units_of(sizes, machine).forward)[0]), sizes

    (small, sizes), (large, _), (whole, _) = map(forward, (128, 512, 4096))
    tokens, flops = float(np.ravel(sizes.tokens)[0]), sizes.layer.attention_flops
    block = tokens * flops / machine.attention_peak() / 8  # an eighth of a sequence
    assert large - small == pytest.approx(3 * block)
    assert whole - small == pytest.approx(7 * block)


def test_logits_move_through_memory_besides_the_heads_products():
    """Products take no time, and weights are read once whatever the number of tokens."""
    for engine, schedule in (("sequential", ""), ("mpmd", "1f1b")):
        machine = machine_of("v5p:2x2x2", 1, Config())._replace(peak=1e30)
        mesh = {"stage": 1} if engine == "sequential" else {}
        fixed = {"model.vocab_size": 4096, "model.logit_tiles": 1}
        sizes = sizes_of(engine, schedule, mesh=mesh, fixed=fixed, num_microbatches=[4, 8])
        heads = np.broadcast_to(units_of(sizes, machine).head, (2, 1, 1, 1, 3))[:, 0, 0, 0, 0]
        tokens = np.broadcast_to(sizes.tokens, (2, 1, 1, 1, 1)).reshape(-1)
        assert heads[0] - heads[1] == pytest.approx(
            16 * 4096 * (tokens[0] - tokens[1]) / machine.hbm
        )


def test_attention_that_holds_scores_takes_full_products_and_moves_its_scores():
    """A backward has two products for one, moves three times the bytes, and makes scores again."""
    for policy, products, passes in (("none", 2, 3), ("minimal", 2.5, 4), ("full", 3, 4)):
        machine = machine_of("v5p:2x2x2", 1, Config())
        long = {"data.sequence_length": 4096, "model.attention": "dot_product"}
        sizes = sizes_of("scheduled", "lockstep_1f1b", fixed=long, remat_policy=[policy])
        length, heads = sizes.config.data.sequence_length, sizes.config.model.num_query_heads
        channels = sizes.config.model.head_dim
        scores = sizes.tokens * heads * length
        computed = 2 * 2 * scores * channels / (machine.peak * machine.matrix_efficiency)
        moved = 2 * (4 + sizes.itemsize) * scores / machine.hbm
        units = units_of(sizes, machine)
        assert np.all(units.forward > computed + moved), (policy, products)
        read = 2 * residual_seconds(sizes, machine, sizes.saving.residuals)  # out of the store
        backward = np.broadcast_to(products * computed + passes * moved, units.input_gradient.shape)
        assert units.input_gradient - read == pytest.approx(backward, rel=0.1), (policy, products)
