"""Compute the times of a block's units: a layer's forward and backward, and the head.

Attention is priced by what the kernel that a run chooses on the devices computes. A flash attention
kernel skips masked blocks of scores, and holds no scores in memory. Two matrix products with all
scores between them skip nothing.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.number import FLOAT32, Number
from maxpipe.plan.remat_cheap import computes_cheap_again
from maxpipe.plan.search.block import along
from maxpipe.plan.search.facts import Facts, LayerCosts
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.traffic import layer_traffic

# Products in splash attention's backward kernels, 3 and 4, over the 2 of its forward.
_BACKWARD = 3.5
# Bytes of scores that a backward moves, as a multiple of its forward's. XLA's estimates of a layer
# of 8 heads and 2048 tokens on v5e give 3.2.
_SCORES_BACKWARD = 3.0


class AttentionSeconds(NamedTuple):
    """Seconds of a layer's attention for one microbatch.

    Attributes:
      forward: seconds in F.
      backward: seconds of the gradients, with scores that are recomputed though their product's
        result is saved. Nothing else that a policy recomputes is included.
    """

    forward: Number
    backward: Number


def attention_seconds(sizes: BlockSizes, machine: Machine, layer: LayerCosts) -> AttentionSeconds:
    """Return the seconds of a layer's attention.

    A kernel that holds scores computes masked ones, too, by matrix products, and moves them through
    memory.
    """
    if not layer.scores:
        length = sizes.config.data.sequence_length
        masked = 1 + min(sizes.config.model.attention_block_size, length) / length
        flops = masked * sizes.tokens * layer.attention_flops
        kernel = flops / machine.attention_peak()
        return AttentionSeconds(kernel, _BACKWARD * kernel)
    peak = machine.peak * machine.matrix_efficiency
    products = sizes.tokens * layer.attention_flops / peak
    # Each of the arrays of `footprint.made_width` is written once and read once.
    moved = 2 * (FLOAT32 + sizes.itemsize) * sizes.tokens * layer.scores / machine.hbm
    # Scores take one of the two products of a forward.
    again = sizes.saving.scores_again * (products / 2 + moved)
    backward = 2 * products + _SCORES_BACKWARD * moved + again
    return AttentionSeconds(products + moved, backward)


# Bytes that move through a device's memory per logit between the products of the head: by XLA's
# estimates of 2048 x 151936 logits, 14 on v5p and 17 on v5e.
_LOGIT_BYTES = 16


class Units(NamedTuple):
    """Seconds of one layer for one microbatch.

    Attributes:
      forward: F.
      input_gradient: I, with what it computes again.
      weight_gradient: W.
      head: logits, loss and their gradients.
    """

    forward: Number
    input_gradient: Number
    weight_gradient: Number
    head: Number

    @property
    def layer(self) -> Number:
        return self.forward + self.input_gradient + self.weight_gradient


def units_of(sizes: BlockSizes, machine: Machine) -> Units:
    again = computes_cheap_again(sizes, machine.tpu)
    layer = _layer(
        sizes, machine, sizes.facts, sizes.saving.recomputed, again, sizes.saving.residuals
    )
    return layer._replace(head=_head(sizes, machine))


def first_layers(sizes: BlockSizes, machine: Machine) -> Number:
    facts = sizes.facts.of_first_layers
    if facts is None:
        return 0.0
    stored: Number = 0.0
    if not sizes.engine.lockstep:
        stored = sizes.saving.first_kept / sizes.num_first - sizes.config.model.embed_dim
    layer = _layer(sizes, machine, facts, sizes.saving.first_recomputed, 0.0, stored)
    # A lockstep engine starts their backward from the tokens, with a forward of its own.
    return sizes.num_first * (layer.layer + sizes.engine.lockstep * layer.forward)


def _head(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the time of logits, loss and their gradients for one microbatch.

    In a pipeline of one program each stage has a share: of every microbatch's tokens on a lockstep
    engine, otherwise of the microbatches.
    """
    engine, size = sizes.engine, sizes.itemsize
    count = sizes.weights.projection  # the table, where embeddings are tied
    tokens = sizes.tokens / (sizes.stages if engine.lockstep else 1)
    tiles = along(sizes.block.tiles, "tiles")
    flops = tokens * sizes.facts.head_flops / sizes.block.grid.layer_shards
    peak = machine.peak * machine.matrix_efficiency
    # The circular engine computes logits again. Every tile reads weights and adds to gradients.
    products = 4 if engine.is_differentiated else 3
    of_tile = np.maximum(flops / tiles / peak, size * count / machine.hbm)
    seconds = products * tiles * of_tile
    logits = flops / (2 * sizes.config.model.embed_dim)
    seconds = seconds + _LOGIT_BYTES * logits / machine.hbm
    sums = tiles * (tiles > 1) + int(engine.has_stages)  # the latter over microbatches
    seconds = seconds + 2 * FLOAT32 * count * sums / machine.stream_rate(FLOAT32)
    return seconds / (sizes.stages if engine.is_differentiated else 1)


def _layer(
    sizes: BlockSizes,
    machine: Machine,
    facts: Facts,
    recomputed: Number,
    again: Number,
    stored: Number,
) -> Units:
    """Return the times of a layer of a model, without the head.

    Args:
      recomputed: share of the forward that the backward computes again.
      again: 1 where the backward also recomputes what lies between products, else 0.
      stored: width of the residuals that go to a store.
    """
    axes, tokens, size = sizes.block.grid.sizes, sizes.tokens, sizes.itemsize
    layer, parameters = facts.layer(axes), facts.parameters(axes)
    peak = machine.peak * machine.matrix_efficiency
    moved = size * parameters.layer_gathered + 2 * size * tokens * layer.results
    # Experts run in kernels, which are taken to reach the same share of the peak as attention's.
    of_experts = layer.expert_flops / machine.attention_peak()
    others = (layer.weight_flops - layer.expert_flops) / peak
    products = np.maximum(tokens * (others + of_experts), moved / machine.hbm)
    # With few tokens the gradients of weights take longer to write than to compute.
    written = size * parameters.layer_gathered / machine.stream_rate(size)
    attention = attention_seconds(sizes, machine, layer)
    # What norms make, and every product's result once more: it is rotated, activated or added.
    between = 2 * size * tokens * (layer.elementwise + layer.results) / machine.hbm
    traffic = layer_traffic(sizes, machine, parameters, layer, stored)
    forward = products + attention.forward + between + traffic.keys + traffic.rows
    backward = (2 + again) * between + attention.backward + traffic.keys + traffic.row_gradients
    return Units(
        forward=forward + traffic.written + traffic.forward,
        input_gradient=products
        + backward
        + recomputed * forward
        + traffic.read
        + traffic.stashed
        + traffic.backward,
        weight_gradient=np.maximum(products, written) + traffic.unstashed + traffic.gradients,
        head=0.0,
    )
