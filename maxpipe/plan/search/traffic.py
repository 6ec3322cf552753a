"""Price what a step moves through a device's memory besides the operands of matrix products.

That is the traffic of units, and outside them the optimizer's update, casts and sums. The rates are
those that XLA's estimates reach, see `devices.chips.MemoryShares`. Zeros that fill sums and stores
are left out: they are less than a hundredth of nearly every step.

Letters: V repeats, M microbatches, L layers of a chunk.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.plan.device_parameters import Parameters
from maxpipe.plan.footprint import itemsize, update_bytes
from maxpipe.plan.layer_costs import LayerCosts
from maxpipe.plan.number import FLOAT32, Number
from maxpipe.plan.search.block import BlockSizes
from maxpipe.plan.search.machine import Machine

# Bytes that a step of a ring moves through memory per value of its output, to merge it with those
# of other steps: by XLA's estimates of 32 heads on v5p, 45 in a forward and 30 in a backward.
_MERGED_BYTES = 40


class Traffic(NamedTuple):
    """Seconds of one layer for one microbatch."""

    residuals: Number  # F writes them to a store; the backward's copy takes as long twice
    stash: Number  # what a weight gradient needs, written by I; W's copy takes as long twice
    forward: Number  # weights that F casts, copies and gathers for itself
    backward: Number  # the same for the backward
    keys: Number  # keys and values that owners send in another order, or what a ring merges
    rows: Number  # rows of experts and their results, moved once
    gradients: Number  # sums of weight gradients


def layer_traffic(
    sizes: BlockSizes, machine: Machine, parameters: Parameters, layer: LayerCosts, stored: Number
) -> Traffic:
    """Return what a layer of a model with these parameters moves.

    `stored` is the width of the residuals that go to a store.
    """
    rate = machine.stream_rate(sizes.itemsize)
    column = sizes.itemsize * sizes.tokens / rate
    # Programs of their own hand residuals over, and unrolled layers keep no stores.
    has_stores = sizes.engine.one_program and not sizes.is_unrolled
    forward, backward = _weights(sizes, machine, parameters, layer)
    context = sizes.block.grid.size("context")
    copied = _copied_experts(sizes, parameters, layer) / rate
    # Once to the order of tokens and once to that of the kernel, each read and written.
    keys = 2 * 2 * column * context * layer.key_values
    output = sizes.config.model.num_query_heads * sizes.config.model.head_dim
    merged = (context - 1) * sizes.tokens * output * _MERGED_BYTES / machine.hbm
    merged = merged / sizes.block.grid.size("tensor")
    return Traffic(
        residuals=has_stores * column * stored,
        stash=has_stores * sizes.splits_backward * column * sizes.saving.stash,
        forward=forward + copied,
        backward=backward + copied,
        keys=(context > 1) * ((1.0 - sizes.in_ring) * keys + sizes.in_ring * merged),
        rows=column * layer.rows,
        gradients=_gradients(sizes, parameters, layer) / machine.stream_rate(FLOAT32),
    )


def _weights(
    sizes: BlockSizes, machine: Machine, parameters: Parameters, layer: LayerCosts
) -> tuple[Number, Number]:
    """Return the seconds that F, and the backward, take to prepare the weights of a layer."""
    size, rate = sizes.itemsize, machine.stream_rate(sizes.itemsize)
    each = sizes.gathers("per_iteration") if sizes.engine.has_stages else 1.0
    is_gathered = parameters.layer_gathered > parameters.layer_at_rest
    gathered = each * is_gathered * size * parameters.layer_gathered / rate
    if sizes.is_written_out:
        stored = itemsize(sizes.config.model.param_dtype)
        # One program casts whole weights before the loop.
        moved: Number = 0.0
        if is_gathered:
            moved = (stored + size) * parameters.layer_at_rest
        elif not sizes.engine.one_program:
            # Products cast the wide weights that they read; the kernels of experts do not.
            experts = layer.expert_weights
            moved = (stored + size) * experts
            moved += max(stored - size, 0) * (parameters.layer_at_rest - experts)
        prepared = gathered + each * moved / machine.stream_rate(FLOAT32)
        return prepared, prepared
    if not sizes.engine.has_stages:
        return gathered * sizes.gathers_of_unit(), gathered * (1.0 - sizes.keeps_gathered)
    once = sizes.gathers("once")
    copied = once * parameters.layer_gathered + (1.0 - once) * parameters.layer_at_rest
    copy = 2 * size * copied / rate
    # A chunk's weights are copied from its stage's, and each layer's from the chunk's.
    unrolled = (sizes.layers > 1) & (not sizes.config.pipeline.scan_layers_per_stage)
    copies = (sizes.repeats > 1) * copy + unrolled * copy
    return gathered + copies, gathered + copies


def _copied_experts(sizes: BlockSizes, parameters: Parameters, layer: LayerCosts) -> Number:
    """Return the bytes that move where a layer's experts are copied from an array of several.

    Kernels read whole arrays. Weights gathered for a single layer are a whole array already. Where
    the circular engine's weights are whole, `_weights` has counted their copies.
    """
    copy = 2 * sizes.itemsize * layer.expert_weights
    is_split = parameters.layer_gathered > parameters.layer_at_rest
    if not sizes.engine.has_stages:
        return copy * (not is_split)
    each = is_split * sizes.gathers("per_iteration")
    counted = sizes.engine.is_differentiated * (1.0 - is_split * (1.0 - sizes.gathers("once")))
    several = np.where(sizes.layers > 1, 1.0, (1.0 - each) * (sizes.repeats > 1))
    return copy * (1.0 - counted) * several


def _gradients(sizes: BlockSizes, parameters: Parameters, layer: LayerCosts) -> Number:
    """Return the bytes that move where a unit adds the gradients of a layer to their sums."""
    is_whole: Number = 0.0
    if sizes.engine.has_stages:
        # Gradients of the repeats at work are summed whole, and become shards when these are done.
        is_whole = sizes.gathers("once") + sizes.gathers("per_repeat")
    count = is_whole * parameters.layer_gathered + (1.0 - is_whole) * parameters.layer_at_rest
    if sizes.is_written_out:
        # Kernels of experts make gradients in the dtype of the weights.
        converted = (sizes.itemsize + FLOAT32) * layer.expert_weights
        # In rings each device copies a part to send it, adds what arrives to the parts that it
        # sends on, and reads what arrives last.
        part, whole = parameters.layer_at_rest, parameters.layer_gathered
        sent_on = np.maximum(whole - 2 * part, 0.0)
        ring = 3 * sizes.itemsize * part + (2 * FLOAT32 + sizes.itemsize) * sent_on
        # The operation that makes gradients adds them to the sums.
        return 2 * FLOAT32 * count + sizes.gathers_in_steps() * ring + converted
    if not sizes.engine.has_stages:
        # The loop over layers puts them into a stack. Without the loop they are read when they are
        # added to the sums over microbatches, see `step_traffic`.
        is_added = sizes.is_unrolled * np.greater(sizes.microbatches, 1)
        return (1.0 - is_added) * (sizes.itemsize + FLOAT32) * count
    return (2 * FLOAT32 + sizes.itemsize) * count


def once_seconds(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the seconds of a step's memory traffic outside its units."""
    parameters, wide = sizes.parameters, machine.stream_rate(FLOAT32)
    moved = update_bytes(sizes.config) * sizes.weights.stored
    # Weights are cast once, or XLA moves the cast of all of them in front of the loops.
    is_cast_ahead: Number = float(sizes.config.model.narrows_parameters)
    if sizes.is_written_out and (sizes.is_split or not sizes.engine.one_program):
        is_cast_ahead = sizes.gathers_once
    cast = itemsize(sizes.config.model.param_dtype) + sizes.itemsize
    moved = moved + is_cast_ahead * cast * parameters.at_rest
    if not sizes.engine.has_stages:
        several = sizes.microbatches * (sizes.microbatches > 1)
        moved = moved + several * 3 * FLOAT32 * parameters.at_rest
    seconds = moved / wide
    if sizes.engine.is_differentiated:
        # In each iteration of a switch between repeats, stages select the weights of either repeat,
        # forwards and backwards, and add gradients to the sums of both.
        delay = sizes.config.pipeline.forwarding_delay
        iterations = (sizes.repeats - 1) * delay * (sizes.stages - 1)
        selected = 2 * 3 * sizes.itemsize / machine.stream_rate(sizes.itemsize)
        of_switch = sizes.layers * parameters.layer_gathered * (selected + 3 * FLOAT32 / wide)
        seconds = seconds + (1.0 - sizes.gathers("per_iteration")) * iterations * of_switch
    return seconds
