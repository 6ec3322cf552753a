"""What closed forms know of a model: the kernel of attention, which the devices decide."""

from helpers.engines import keys

from maxpipe.config import Config, replace
from maxpipe.config.sections import MESH_AXES
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.request import placed
from maxpipe.plan.search.space import Grid

HEADS, TOKENS = 4, 512
# Heads and lengths that the TPU's kernel takes.
SIZES = keys(
    f"num_layers=4 embed_dim=256 num_query_heads={HEADS} num_kv_heads=2 head_dim=128 "
    f"dtype=bfloat16 sequence_length={TOKENS}"
)
NO_PACKING = {"data.packing": False}


def placed_on(topology, **values):
    config = replace(Config(), **(SIZES | values))
    return placed(config, machine_of(topology, 1, config))


def mesh(**sizes):
    return tuple(sizes.get(axis, 1) for axis in MESH_AXES)


def test_scores_are_held_where_the_kernel_of_a_run_holds_them():
    for topology, values, axes, holds in (
        ("H100:8", {}, {}, True),  # the default packs documents
        ("H100:8", NO_PACKING, {}, False),
        ("H100:8", NO_PACKING, {"context": 2}, True),
        ("v5e:2x2", {}, {}, False),
        ("v5e:2x2", {}, {"context": 2}, False),
        ("v5e:2x2", {}, {"context": 4}, True),  # parts of 128 tokens, and kernels take two
        ("v5e:2x2", {"model.head_dim": 64}, {}, True),
        ("v5e:2x2", {"model.attention_sinks": True}, {}, True),
        ("v5e:2x2", {"data.sequence_length": 500}, {}, True),
        ("v5e:2x2", {"model.attention": "dot_product"}, {}, True),
        ("cpu:4", {}, {}, True),
    ):
        facts = Facts(placed_on(topology, **values))
        length = facts.config.data.sequence_length
        for tensor in (1, 2):
            layer = facts.layer(mesh(tensor=tensor, **axes))
            assert layer.scores == holds * HEADS / tensor * length, (topology, values)


def test_a_kernel_that_holds_scores_needs_memory_for_them_and_computes_masked_ones_too():
    for topology, arrays in (
        ("H100:8", 2),  # in float32 and in bfloat16, each with its gradient
        ("v5e:2x2", 1),  # gradients are made where they are read
    ):
        flash, scores = (
            Facts(placed_on(topology, **NO_PACKING, **values))
            for values in ({}, {"model.attention": "dot_product"})
        )
        plain, held = flash.layer(mesh()), scores.layer(mesh())
        of_token = HEADS * TOKENS
        assert held.working - plain.working == arrays * 3 * of_token
        assert held.made - plain.made == 3 * of_token
        assert held.results == plain.results
        assert held.attention_flops == 2 * plain.attention_flops
        assert held.weight_flops == plain.weight_flops
        # Probabilities are kept where everything is: in float32, two values of bfloat16.
        for policy, kept in (("none", 2), ("minimal", 0), ("full", 0)):
            residuals = [
                facts.saving(mesh(), "sequential", policy, scans=True).residuals
                for facts in (flash, scores)
            ]
            assert residuals[1] - residuals[0] == kept * of_token, policy


def test_meshes_that_a_configured_kernel_does_not_run_on_are_not_legal():
    for topology, kernel, axes, words in (
        ("H100:8", "splash", {}, "model.attention: splash cannot be used"),
        ("H100:8", "cudnn", {}, ""),
        ("H100:8", "cudnn", {"context": 2}, "model.attention: cudnn cannot be used"),
        ("v5e:2x2", "splash", {"context": 2}, ""),
        ("v5e:2x2", "cudnn", {}, "model.attention: cudnn cannot be used"),
    ):
        config = placed_on(topology, **NO_PACKING, **{"model.attention": kernel})
        assert Legality(config).of_mesh(Grid(mesh(**axes), mesh())) == words, (topology, kernel)
