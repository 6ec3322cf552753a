"""Compute the step of a block's candidates: units, transfers, and how the schedule runs them.

Units are a layer's forward and backward, and the head. Letters: F, I, W times of a chunk's forward,
input gradient and weight gradient; S stages, V repeats, M microbatches.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.choices import computes_cheap_again
from maxpipe.plan.layer_costs import LayerCosts
from maxpipe.plan.links import LinkCosts, joint, link_costs
from maxpipe.plan.number import FLOAT32, Number, Seconds
from maxpipe.plan.search.block import BlockSizes
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.traffic import layer_traffic, once_seconds
from maxpipe.sharding.collectives import EXPERT_AXIS, FEW_DEVICES

# Products in splash attention's backward kernels, 3 and 4, over the 2 of its forward.
_BACKWARD = 3.5
# Bytes of scores that a backward moves, as a multiple of its forward's. XLA's estimates of a layer
# of 8 heads and 2048 tokens on v5e give 3.2.
_SCORES_BACKWARD = 3.0
# Bytes that move through a device's memory per logit between the products of the head: by XLA's
# estimates of 2048 x 151936 logits, 14 on v5p and 17 on v5e.
_LOGIT_BYTES = 16
# How often rows of experts and their results pass through memory, by XLA's estimates of a layer of
# qwen3-30b-a3b on v5p: gathers, sums over the experts of a token, and their gradients.
_ROW_PASSES, _ROW_GRADIENT_PASSES = 1.5, 3.5


def _attention(sizes: BlockSizes, machine: Machine, layer: LayerCosts) -> tuple[Number, Number]:
    """Return the seconds of a layer's attention for one microbatch: in F, and of its gradients.

    A flash attention kernel skips masked blocks of scores, and holds none in memory. A kernel that
    holds them computes masked ones, too, by matrix products, and moves them through memory. Scores
    that are recomputed though their product's result is saved are included; nothing else that a
    policy recomputes is.
    """
    if not layer.scores:
        length = sizes.config.data.sequence_length
        masked = 1 + min(sizes.config.model.attention_block_size, length) / length
        flops = masked * sizes.tokens * layer.attention_flops
        kernel = flops / machine.attention_peak
        return kernel, _BACKWARD * kernel
    products = sizes.tokens * layer.attention_flops / machine.matrix_peak
    # Each of the arrays of `LayerCosts.made` is written once and read once.
    moved = 2 * (FLOAT32 + sizes.itemsize) * sizes.tokens * layer.scores / machine.hbm
    # Scores take one of the two products of a forward.
    again = sizes.saving.scores_again * (products / 2 + moved)
    backward = 2 * products + _SCORES_BACKWARD * moved + again
    return products + moved, backward


class Units(NamedTuple):
    """Seconds of one layer for one microbatch; I includes what it computes again."""

    forward: Number
    input_gradient: Number
    weight_gradient: Number
    head: Number

    @property
    def layer(self) -> Number:
        return self.forward + self.input_gradient + self.weight_gradient


def units_of(sizes: BlockSizes, machine: Machine) -> Units:
    again, saving = computes_cheap_again(sizes, machine.tpu), sizes.saving
    layer = _layer(sizes, machine, sizes.facts, saving.recomputed, again, saving.residuals)
    return layer._replace(head=_head(sizes, machine))


def first_layers(sizes: BlockSizes, machine: Machine) -> Number:
    facts = sizes.facts.of_first_layers
    if facts is None:
        return 0.0
    stored: Number = 0.0
    count = sizes.config.model.first_dense_layers
    if not sizes.engine.lockstep:
        stored = sizes.saving.first_kept / count - sizes.config.model.embed_dim
    layer = _layer(sizes, machine, facts, sizes.saving.first_recomputed, 0.0, stored)
    # A lockstep engine starts their backward from the tokens, with a forward of its own.
    return count * (layer.layer + sizes.engine.lockstep * layer.forward)


def _head(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the time of the head of a microbatch, of which stages of one program have shares."""
    engine, size, tiles = sizes.engine, sizes.itemsize, sizes.tiles
    count = sizes.parameters.projection  # the table, where embeddings are tied
    tokens = sizes.tokens / (sizes.stages if engine.lockstep else 1)
    flops = tokens * sizes.facts.head_flops / sizes.block.grid.layer_shards
    # The circular engine computes logits again. Every tile reads weights and adds to gradients.
    products = 4 if engine.is_differentiated else 3
    of_tile = np.maximum(flops / tiles / machine.matrix_peak, size * count / machine.hbm)
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
    moved = size * parameters.layer_gathered + 2 * size * tokens * layer.results
    # Tiles with rows of two experts are computed for both; their rows are those of
    # `model.experts.megablox`.
    of_experts = tokens * layer.expert_flops
    rows_of_expert = of_experts / (2 * np.maximum(1, layer.expert_weights))
    tile = np.where(rows_of_expert >= 4 * machine.row_tile, 1, 0.5) * machine.row_tile
    of_experts = of_experts + 2 * tile * layer.expert_weights
    others = tokens * (layer.weight_flops - layer.expert_flops)
    computed = others / machine.matrix_peak + of_experts / machine.grouped_peak
    products = np.maximum(computed, moved / machine.hbm)
    # With few tokens the gradients of weights take longer to write than to compute.
    written = size * parameters.layer_gathered / machine.stream_rate(size)
    attention, attention_backward = _attention(sizes, machine, layer)
    # What norms make, and every product's result once more: it is rotated, activated or added.
    between = 2 * size * tokens * (layer.elementwise + layer.results) / machine.hbm
    traffic = layer_traffic(sizes, machine, parameters, layer, stored)
    forward = products + attention + between + traffic.keys + _ROW_PASSES * traffic.rows
    backward = (2 + again) * between + attention_backward + traffic.keys + recomputed * forward
    backward += _ROW_GRADIENT_PASSES * traffic.rows
    # The operation that makes what a store holds writes it there; its reader gets a copy.
    read, stashed = 2 * traffic.residuals, traffic.stash
    return Units(
        forward=forward + traffic.residuals + traffic.forward,
        input_gradient=products + backward + read + stashed + traffic.backward,
        weight_gradient=np.maximum(products, written) + 2 * stashed + traffic.gradients,
        head=0.0,
    )


class Waits(NamedTuple):
    """Seconds of transfers of one layer or one microbatch, as if nothing hid them."""

    gather: Number  # of a layer's weights
    scatter: Number  # of its gradients, over devices that share its weights
    outer: Number  # gathers and sums of embedding and head, once
    forward: Number  # of activations in a layer, which the next product waits for
    backward: Number
    gradient: Number  # sum over copies of a layer's weights, where every unit has one
    reduction: Number  # sum of the other gradients over copies of the parameters, once a step
    permute: Number  # of activations to the next stage


def waits_of(sizes: BlockSizes, machine: Machine) -> Waits:
    costs = link_costs(machine, sizes.block.grid)
    activations = sizes.tokens * sizes.itemsize * sizes.config.model.embed_dim
    return Waits(
        *_weight_waits(sizes, costs),
        *_activation_waits(sizes, costs),
        *_gradient_waits(sizes, costs),
        permute=activations * costs.permute,
    )


def _weight_waits(sizes: BlockSizes, costs: LinkCosts) -> tuple[Number, Number, Number]:
    """Return the seconds to gather a layer, to scatter its gradients, and both for the ends.

    Embedding and head take all links along fsdp and stage, or along fsdp where each lies on one
    stage.
    """
    parameters, at_rest = sizes.parameters, sizes.parameters.ends_at_rest
    # The network between slices is no further link.
    by_stages = 0.0 if costs.crosses_slices else costs.of("stage")
    if not sizes.engine.one_program:
        by_stages, at_rest = 0.0, parameters.embed_of_stage + parameters.head_of_stage
    layer = parameters.layer_gathered - parameters.layer_at_rest
    ends = parameters.embed_gathered + parameters.head_gathered - at_rest
    # Collectives sum in float32, but XLA's partitioner in the dtype of activations.
    summed = FLOAT32 if sizes.is_written_out else sizes.itemsize
    scatter = costs.scatter(_by_autodiff(sizes))
    scatter_ends = costs.scatter(float(not sizes.is_written_out))
    return (
        layer * sizes.itemsize * costs.gather,
        layer * np.where(sizes.gathers_in_steps(), _in_steps(sizes), summed) * scatter,
        ends * sizes.itemsize * joint(costs.gather, by_stages)
        + ends * summed * joint(scatter_ends, by_stages),
    )


def _activation_waits(sizes: BlockSizes, costs: LinkCosts) -> tuple[Number, Number]:
    """Return the seconds of a layer's transfers of activations, forwards and backwards.

    With A bytes of activations (A' in float32; among few devices A), K bytes of keys and values,
    and c(axis) the seconds per byte along an axis, a forward takes

        2 A c(sum over tensor) + K (context - 1) c(context) + (A + A') (expert - 1) c(expert)

    since layers sum twice, and every device gets the tokens of all devices with other experts and
    sends sums back. A backward takes as long, and again for the share that it recomputes; but keys
    are gathered again if it recomputes anything, and their gradients are summed like A'. In a
    ring, attention hides the transfers of both.
    """
    grid, embed = sizes.block.grid, sizes.config.model.embed_dim
    activations = sizes.tokens * sizes.itemsize * embed
    summed = 2 * activations * costs.of_sum("tensor")
    others = grid.size("context") - 1
    keys = sizes.tokens * sizes.itemsize * sizes.layer.key_values * others * costs.of("context")
    keys = (1.0 - sizes.in_ring) * keys
    sharing, wide = grid.size(EXPERT_AXIS), FLOAT32 / sizes.itemsize
    exchanged = activations * (1 + np.where(sharing > FEW_DEVICES, wide, 1))
    exchanged = exchanged * (sharing - 1) * costs.of(EXPERT_AXIS)
    again = summed + exchanged
    keys_backward = keys * (
        np.where(others >= FEW_DEVICES, wide, 1) + np.greater(sizes.saving.recomputed, 0)
    )
    return again + keys, again * (1 + sizes.saving.recomputed) + keys_backward


def _gradient_waits(sizes: BlockSizes, costs: LinkCosts) -> tuple[Number, Number]:
    """Return the seconds to sum a layer's gradients over copies in a unit, and others in a step.

    Where autodiff makes units sum the gradients of layers, only those of embedding and head remain
    for the step.
    """
    parameters, by_autodiff = sizes.parameters, _by_autodiff(sizes)
    of_copies = costs.of_sum("data", "context")
    layers = parameters.at_rest - parameters.ends_at_rest
    in_step = parameters.ends_at_rest + (1.0 - by_autodiff) * layers
    in_unit = by_autodiff * parameters.layer_at_rest
    return sizes.itemsize * in_unit * of_copies, FLOAT32 * in_step * of_copies


def unit_waits(sizes: BlockSizes, units: Units, waits: Waits) -> tuple[Number, Number]:
    """Return the seconds that the F and the backward of a chunk wait for transfers."""
    layers = sizes.layers if sizes.engine.has_stages else 1.0
    each = sizes.gathers("per_iteration") if sizes.engine.has_stages else 1.0
    in_steps = sizes.gathers_in_steps()
    moved = (1.0 - sizes.keeps_gathered) * waits.gather + waits.scatter
    backward = units.input_gradient + units.weight_gradient
    # Where weights are gathered in the unit that reads them, the transfers follow its computation.
    before = in_steps * _exposed(layers * waits.gather, 0.0, layers * units.forward)
    before += (1.0 - in_steps) * layers * waits.gather * sizes.gathers_of_unit()
    # A backward ends with attention, when most of the last layer's gradients are on their way.
    after = in_steps * _exposed(layers * moved, 0.5 * waits.scatter, layers * backward)
    after += (1.0 - in_steps) * layers * moved
    in_backward = layers * (waits.backward + waits.gradient)
    return layers * waits.forward + each * before, in_backward + each * after


def _in_steps(sizes: BlockSizes) -> float:
    """Return the bytes of a gradient that goes from neighbour to neighbour, on average.

    The first goes as it was computed; each neighbour adds to it in float32.
    """
    steps = max(sizes.block.grid.size("fsdp") - 1, 1)
    return (sizes.itemsize + FLOAT32 * (steps - 1)) / steps


def _by_autodiff(sizes: BlockSizes) -> Number:
    """Return 1 where JAX differentiates the loop over layers or iterations, else 0."""
    if not sizes.engine.has_stages:
        return 1.0
    return 0.0 if sizes.is_written_out else sizes.gathers("per_iteration")


def _exposed(transfer: Number, last: Number, compute: Number) -> Number:
    """Return the seconds that computation does not hide of transfers that run during it.

    `last` is the part of the transfers that comes after all computation.
    """
    return last + np.maximum(np.subtract(transfer - last, compute), 0.0)


def step_seconds(sizes: BlockSizes, machine: Machine) -> Seconds:
    """Return the predicted step of each candidate, means of all stages."""
    units, waits = units_of(sizes, machine), waits_of(sizes, machine)
    count = sizes.microbatches
    pipelined = sizes.repeats * sizes.layers * units.layer
    outside = sizes.outside * units.layer + first_layers(sizes, machine)
    outside = outside * sizes.share_of_outside()
    products = count * (pipelined + outside + units.head) + once_seconds(sizes, machine)
    bubble = _bubble(sizes, units, waits)
    if sizes.engine.has_stages and not sizes.engine.one_program:
        # One stage runs these while the others are idle.
        ends = count * (outside + units.head) * (1.0 - 1.0 / sizes.stages)
        products, bubble = products - ends, bubble + ends
    return Seconds(products, _communication(sizes, units, waits), bubble)


def _communication(sizes: BlockSizes, units: Units, waits: Waits) -> Number:
    """Return the seconds that a step waits for transfers, without those of idle slots."""
    engine, count = sizes.engine, sizes.microbatches
    chunks = sizes.repeats if engine.has_stages else sizes.config.model.stacked_layers
    seconds = count * chunks * sum(unit_waits(sizes, units, waits)) + waits.reduction
    # Embedding and head are gathered for every microbatch, or once by mode or with a conveyor.
    times: Number = 1.0 if engine.is_differentiated else count
    if engine.has_stages:
        # A repeat's weights are gathered during the one before.
        whole = sizes.gathers("once") + sizes.gathers("per_repeat") / chunks
        seconds = seconds + whole * chunks * sizes.layers * (waits.gather + waits.scatter)
        seconds = seconds + sizes.of_pattern("transfers") * waits.permute
        times = 1.0 + sizes.gathers("per_iteration") * (times - 1.0)
    if engine.lockstep:
        seconds = seconds + _late_transfers(sizes, units, waits)
    # In layers outside the pipeline activations travel as in others, for a device's share of them.
    outside = sizes.outside * sizes.share_of_outside() * (waits.forward + waits.backward)
    return seconds + times * waits.outer + count * outside


def _late_transfers(sizes: BlockSizes, units: Units, waits: Waits) -> Number:
    """Return the seconds that ticks of F and B wait, where transfers take longer than units.

    Activations travel during the B of their tick, gradients during the next F, and with delayed
    forwarding both have a whole tick.
    """
    forward = sizes.layers * units.forward
    times = [forward, sizes.layers * units.layer - forward]
    if sizes.config.pipeline.forwarding_delay > 1:
        times = 2 * [sizes.layers * units.layer]
    late = sum(np.maximum(waits.permute - time, 0.0) for time in times)
    return sizes.microbatches * sizes.repeats * late


def _bubble(sizes: BlockSizes, units: Units, waits: Waits) -> Number:
    """Return the seconds of idle slots, which lockstep computes masked, or of idle stages."""
    if not sizes.engine.has_stages:
        return np.zeros(1)
    forward, backward = unit_waits(sizes, units, waits)
    f_chunk = sizes.layers * units.forward + forward
    if not sizes.engine.one_program:
        idle, recomputed = sizes.of_pattern("idle"), sizes.of_pattern("idle_recomputed")
        share = np.minimum(sizes.saving.recomputed, 1.0)
        return f_chunk * (idle + share * (recomputed - idle))
    return (
        sizes.of_pattern("idle_forward") * f_chunk
        + sizes.of_pattern("idle_backward") * (sizes.layers * units.input_gradient + backward)
        + sizes.of_pattern("idle_weight") * sizes.layers * units.weight_gradient
    )
