"""Compute the time of a block's candidates: units, transfers, and how the schedule runs them.

Letters: F, I, W times of a chunk's forward, input gradient and weight gradient; S stages,
V repeats, M microbatches.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.devices.chips import ATTENTION_BLOCK
from maxpipe.planning.prefetch import IDLE_SHARE
from maxpipe.planning.remat_cheap import KEY as REMAT_CHEAP
from maxpipe.planning.search.block import along
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import Machine
from maxpipe.planning.search.memory import memory_bytes
from maxpipe.planning.search.seconds import (
    ATTENTION_BACKWARD,
    Seconds,
    Units,
    Waits,
    exposed,
    roofline,
)
from maxpipe.planning.search.sizes import FLOAT32, BlockSizes
from maxpipe.planning.search.step_traffic import once_seconds
from maxpipe.planning.search.traffic import layer_traffic
from maxpipe.planning.stores import Number
from maxpipe.sharding.collectives import EXPERT_AXIS


def step_seconds(sizes: BlockSizes, machine: Machine) -> Seconds:
    """Return the predicted step of each candidate, arrays of the block's dimensions."""
    return composed(sizes, machine, units_of(sizes, machine), waits_of(sizes, machine))


def composed(sizes: BlockSizes, machine: Machine, units: Units, waits: Waits) -> Seconds:
    """Return the step of units and transfers that take so long, as the schedule runs them."""
    products = _products(sizes, machine, units)
    return Seconds(products, _communication(sizes, units, waits), _bubble(sizes, units, waits))


class _Layer(NamedTuple):
    """Times of a layer for one microbatch, as of `Units`."""

    forward: Number
    input_gradient: Number
    weight_gradient: Number


def units_of(sizes: BlockSizes, machine: Machine) -> Units:
    """Return the times of a layer and of the head for one microbatch."""
    again = _computes_cheap_again(sizes, machine)
    layer = _layer(sizes, machine, sizes.facts, sizes.recomputed, again, sizes.residuals)
    return Units(*layer, _head(sizes, machine))


def _computes_cheap_again(sizes: BlockSizes, machine: Machine) -> Number:
    """Return 1 where a backward of several layers computes what is cheap once more, else 0.

    It holds the results of products alone then, see `planning.remat_cheap`.
    """
    pipeline, engine = sizes.config.pipeline, sizes.engine
    several = (sizes.layers > 1) * (sizes.held > sizes.residuals)
    if not engine.has_stages or not np.any(several):
        return 0.0
    chosen = pipeline.remat_cheap if engine.takes(REMAT_CHEAP) else "true"
    by_layer = pipeline.scan_layers_per_stage or pipeline.remat_layers
    has_choice = chosen != "true" and not by_layer and not sizes.splits_backward
    if has_choice and chosen == "false":
        return 0.0
    if not has_choice or machine.tpu_memory is None:
        return several
    held = (sizes.layers - 1) * sizes.cheap * sizes.itemsize * sizes.tokens
    return several * (memory_bytes(sizes) + held > IDLE_SHARE * machine.tpu_memory)


def _head(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the time of logits, loss and their gradients for one microbatch.

    Of the devices of a pipeline in one program each has a share: of every microbatch's tokens on a
    lockstep engine, else of the microbatches.
    """
    engine, size, count = sizes.engine, sizes.itemsize, sizes.parameters.head_gathered
    tokens = sizes.tokens / (sizes.stages if engine.lockstep else 1)
    tiles = along(sizes.block.tiles, "tiles")
    flops = tokens * sizes.facts.head_flops / sizes.block.grid.layer_shards
    peak = machine.peak * machine.matrix_efficiency
    # Autodiff computes logits again. Every tile reads the weights, and adds to their gradients.
    products = 3 if sizes.is_written_out else 4
    seconds = products * tiles * roofline(flops / tiles, peak, size * count, machine.hbm)
    sums = tiles * (tiles > 1)
    if engine.has_stages:
        sums = sums + 1  # over microbatches
    seconds = seconds + 2 * FLOAT32 * count * sums / machine.stream_rate(FLOAT32)
    return seconds / (sizes.stages if engine.is_differentiated else 1)


def _first_layers(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the time of all first dense layers for one microbatch."""
    facts = sizes.facts.of_first_layers
    if facts is None:
        return 0.0
    stored: Number = 0.0
    if not sizes.engine.lockstep:
        stored = sizes.first_kept / sizes.num_first - sizes.config.model.embed_dim
    layer = _layer(sizes, machine, facts, sizes.first_recomputed, 0.0, stored)
    # A lockstep engine begins their backward at the tokens.
    return sizes.num_first * (sum(layer) + sizes.engine.lockstep * layer.forward)


def _layer(
    sizes: BlockSizes,
    machine: Machine,
    facts: Facts,
    recomputed: Number,
    again: Number,
    stored: Number,
) -> _Layer:
    """Return the times of a layer of a model.

    Args:
      sizes: of the block.
      machine: that runs it.
      facts: of the model.
      recomputed: share of the forward that the backward computes again.
      again: how often it makes what lies between products once more.
      stored: width of the residuals that go to a store.
    """
    axes, tokens, size = sizes.block.grid.sizes, sizes.tokens, sizes.itemsize
    layer, parameters = facts.layer(axes), facts.parameters(axes)
    peak = machine.peak * machine.matrix_efficiency
    moved = size * parameters.layer_gathered + 2 * size * tokens * layer.results
    # Experts run in kernels, whose share of the peak is taken to be that of attention's.
    of_experts = layer.expert_flops / machine.attention_peak()
    others = (layer.weight_flops - layer.expert_flops) / peak
    products = np.maximum(tokens * (others + of_experts), moved / machine.hbm)
    # With few tokens the gradients of weights take longer to write than to compute.
    written = size * parameters.layer_gathered / machine.stream_rate(size)
    length = sizes.config.data.sequence_length
    masked = 1 + min(ATTENTION_BLOCK, length) / length
    attention = masked * tokens * layer.attention_flops / machine.attention_peak()
    # What norms make, and every product's result once more: it is rotated, activated or added.
    between = 2 * size * tokens * (layer.elementwise + layer.results) / machine.hbm
    traffic = layer_traffic(sizes, machine, parameters, layer, stored)
    forward = products + attention + between + traffic.keys + traffic.rows
    return _Layer(
        forward + traffic.written + traffic.forward,
        products
        + ATTENTION_BACKWARD * attention
        + (2 + again) * between
        + traffic.keys
        + traffic.row_gradients
        + recomputed * forward
        + traffic.read
        + traffic.backward,
        np.maximum(products, written) + traffic.gradients,
    )


def _products(sizes: BlockSizes, machine: Machine, units: Units) -> Number:
    """Return the seconds of all that is no waiting and no bubble."""
    count = sizes.microbatches
    pipelined = sizes.repeats * sizes.layers * units.layer
    # One program divides the layers outside among the stages.
    share = sizes.stages if sizes.engine.one_program else 1
    outside = (sizes.outside * units.layer + _first_layers(sizes, machine)) / share
    return count * (pipelined + outside + units.head) + once_seconds(sizes, machine)


def waits_of(sizes: BlockSizes, machine: Machine) -> Waits:
    """Return the seconds of transfers."""
    grid, parameters = sizes.block.grid, sizes.parameters
    links = machine.links(grid)

    def cost(axis: str) -> float:
        return machine.collective_cost(grid, links, axis) if grid.size(axis) > 1 else 0.0

    moved = parameters.layer_gathered - parameters.layer_at_rest
    gradient_size = 4.0 if sizes.is_written_out else sizes.itemsize
    activations = sizes.tokens * sizes.itemsize * sizes.config.model.embed_dim
    tensor, context = grid.size("tensor"), grid.size("context")
    experts = grid.size(EXPERT_AXIS)
    # Two sums of activations over tensor in a forward, each as a scatter and a gather.
    summed = 2 * 2 * activations * (tensor - 1) / tensor * cost("tensor")
    keys = sizes.tokens * sizes.itemsize * sizes.layer.key_values * (context - 1) * cost("context")
    # Every device gets the tokens of all, and the sums over devices go back, float32.
    sums = sizes.tokens * 4.0 * sizes.config.model.embed_dim
    exchanged = (activations + sums) * (experts - 1) * cost(EXPERT_AXIS)
    outer = parameters.embed_gathered + parameters.head_gathered - parameters.outer_at_rest
    # Devices that share weights sum up their gradients, by autodiff in every unit.
    sharing = grid.size("data") * context
    summed_once = 2 * (sharing - 1) / sharing * _joint(cost("data"), cost("context"))
    by_autodiff = _by_autodiff(sizes)
    units = 1.0 if sizes.engine.has_stages else sizes.microbatches
    # So do devices that share experts, of the other weights.
    over_experts = 2 * (experts - 1) / experts * cost(EXPERT_AXIS)
    of_layer = (parameters.layer_gathered - sizes.layer.expert_weights) / grid.size("fsdp")
    once_over_experts = (1.0 - by_autodiff) * parameters.whole_over_experts
    once_over_experts = once_over_experts + by_autodiff * parameters.outer_at_rest
    once = 4.0 * (1.0 - by_autodiff) * parameters.at_rest
    once = once + by_autodiff * units * sizes.itemsize * parameters.outer_at_rest
    return Waits(
        gather=sizes.itemsize * moved * cost("fsdp"),
        scatter=gradient_size * moved * cost("fsdp"),
        forward=summed + keys + exchanged,
        # Sums of keys' gradients are float32; keys of other devices are gathered again.
        backward=(summed + exchanged) * (1 + sizes.recomputed)
        + keys * (2.0 + np.greater(sizes.recomputed, 0)),
        gradient=by_autodiff
        * sizes.itemsize
        * (parameters.layer_at_rest * summed_once + of_layer * over_experts),
        permute=activations * machine.permute_cost(grid, links) * (sizes.stages > 1),
        reduction=once * summed_once + 4.0 * once_over_experts * over_experts,
        outer=(sizes.itemsize + gradient_size) * outer * _joint(cost("fsdp"), cost("stage")),
    )


def head_wait(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the seconds of transfers of the head's parameters in units of the mpmd engine.

    The last chunk's units gather them over fsdp, and sum up their gradients, for each microbatch.
    """
    grid, parameters = sizes.block.grid, sizes.parameters
    size = grid.size("fsdp")
    if size == 1:
        return 0.0
    count = parameters.head_gathered
    if sizes.config.model.tie_embeddings:
        count += parameters.embed_gathered
    cost = machine.collective_cost(grid, machine.links(grid), "fsdp")
    moved = (sizes.itemsize + FLOAT32) * count * (size - 1) / size
    return sizes.gathers("per_iteration") * moved * cost


def _joint(*costs: float) -> float:
    """Return the seconds of a byte in collectives along several axes, which use all their links."""
    rates = [1 / cost for cost in costs if cost]
    return 1 / sum(rates) if rates else 0.0


def unit_waits(sizes: BlockSizes, units: Units, waits: Waits) -> tuple[Number, Number]:
    """Return the seconds that the F and the backward of a chunk wait for transfers."""
    layers = sizes.layers if sizes.engine.has_stages else 1.0
    each = sizes.gathers("per_iteration") if sizes.engine.has_stages else 1.0
    ahead = sizes.gathers_ahead()
    moved = waits.gather + waits.scatter
    backward = units.input_gradient + units.weight_gradient
    # Where weights are gathered in the unit that reads them, the transfers follow its computation.
    before = ahead * exposed(layers * waits.gather, 0.0, layers * units.forward)
    before += (1.0 - ahead) * layers * waits.gather
    after = ahead * exposed(layers * moved, waits.scatter, layers * backward)
    after += (1.0 - ahead) * layers * moved
    in_backward = layers * (waits.backward + waits.gradient)
    return layers * waits.forward + each * before, in_backward + each * after


def _by_autodiff(sizes: BlockSizes) -> Number:
    """Return 1 where JAX differentiates the loop over layers or iterations, else 0."""
    if not sizes.engine.has_stages:
        return 1.0
    return 0.0 if sizes.is_written_out else sizes.gathers("per_iteration")


def _communication(sizes: BlockSizes, units: Units, waits: Waits) -> Number:
    """Return the seconds that a step waits for transfers, without those of idle slots."""
    forward, backward = unit_waits(sizes, units, waits)
    chunks = sizes.repeats if sizes.engine.has_stages else sizes.config.model.stacked_layers
    per_unit = sizes.microbatches * chunks * (forward + backward)
    of_stage = chunks * sizes.layers * (waits.gather + waits.scatter)
    gathered = sizes.gathers("once") * of_stage if sizes.engine.has_stages else 0.0
    if sizes.engine.has_stages:
        # A repeat's weights are gathered during the one before.
        gathered = gathered + sizes.gathers("per_repeat") * of_stage / chunks
    transfers = sizes.of_pattern("transfers") * waits.permute if sizes.engine.has_stages else 0.0
    # Embedding and head are gathered for every microbatch, unless once, or by a conveyor of all.
    times = 1.0 if sizes.engine.is_differentiated else sizes.microbatches
    if sizes.engine.has_stages and not sizes.engine.is_differentiated:
        times = 1.0 + sizes.gathers("per_iteration") * (times - 1.0)
    return per_unit + gathered + transfers + waits.reduction + times * waits.outer


def _bubble(sizes: BlockSizes, units: Units, waits: Waits) -> Number:
    """Return the seconds of idle slots, which lockstep computes masked, or of idle stages."""
    if not sizes.engine.has_stages:
        return np.zeros(1)
    forward, backward = unit_waits(sizes, units, waits)
    f_chunk = sizes.layers * units.forward + forward
    if not sizes.engine.one_program:
        idle, recomputed = sizes.of_pattern("idle"), sizes.of_pattern("idle_recomputed")
        share = np.minimum(sizes.recomputed, 1.0)
        return f_chunk * (idle + share * (recomputed - idle))
    return (
        sizes.of_pattern("idle_forward") * f_chunk
        + sizes.of_pattern("idle_backward") * (sizes.layers * units.input_gradient + backward)
        + sizes.of_pattern("idle_weight") * sizes.layers * units.weight_gradient
    )
