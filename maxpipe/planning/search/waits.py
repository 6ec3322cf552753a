"""Compute the times of a block's transfers: of weights, gradients, activations and tokens."""

import numpy as np

from maxpipe.planning.search.machine import Machine
from maxpipe.planning.search.seconds import Units, Waits, exposed
from maxpipe.planning.search.sizes import BlockSizes
from maxpipe.planning.stores import FLOAT32, Number
from maxpipe.sharding.collectives import EXPERT_AXIS


def waits_of(sizes: BlockSizes, machine: Machine) -> Waits:
    """Return the seconds of transfers."""
    grid, parameters = sizes.block.grid, sizes.parameters
    links = machine.links(grid)

    def cost(axis: str) -> float:
        return machine.collective_cost(grid, links, axis) if grid.size(axis) > 1 else 0.0

    by_autodiff = _by_autodiff(sizes)
    gathered = machine.gather_cost(grid, links, "fsdp") if grid.size("fsdp") > 1 else 0.0

    def scattered(by_partitioner: Number) -> Number:
        """Return what a byte of a gradient takes; the partitioner sums along a whole torus."""
        if not machine.is_whole_torus(grid, links, "fsdp"):
            return cost("fsdp")
        return by_partitioner * 2 * cost("fsdp") + (1.0 - by_partitioner) * gathered

    moved = parameters.layer_gathered - parameters.layer_at_rest
    activations = sizes.tokens * sizes.itemsize * sizes.config.model.embed_dim
    tensor, context = grid.size("tensor"), grid.size("context")
    experts = grid.size(EXPERT_AXIS)
    # Two sums of activations over tensor in a forward, each as a scatter and a gather.
    summed = 2 * 2 * activations * (tensor - 1) / tensor * cost("tensor")
    keys = sizes.tokens * sizes.itemsize * sizes.layer.key_values * (context - 1) * cost("context")
    # Every device gets the tokens of all, and the sums over devices go back, float32.
    sums = sizes.tokens * FLOAT32 * sizes.config.model.embed_dim
    exchanged = (activations + sums) * (experts - 1) * cost(EXPERT_AXIS)
    outer = parameters.embed_gathered + parameters.head_gathered - parameters.outer_at_rest
    # Devices that share weights sum up their gradients, by autodiff in every unit.
    over_data, over_context = (
        2 * (n - 1) / n * cost(axis)
        for axis, n in (("data", grid.size("data")), ("context", context))
    )
    sharing = grid.size("data") * context
    summed_once = 2 * (sharing - 1) / sharing * _joint(cost("data"), cost("context"))
    # Where a stage has several repeats, a differentiated loop sums up over context once.
    is_once = sizes.engine.has_stages * np.greater(sizes.repeats, 1)
    in_units = np.where(is_once, over_data, summed_once)
    units = 1.0 if sizes.engine.has_stages else sizes.microbatches
    # So do devices that share experts, of the other weights.
    over_experts = 2 * (experts - 1) / experts * cost(EXPERT_AXIS)
    of_layer = (parameters.layer_gathered - sizes.layer.expert_weights) / grid.size("fsdp")
    once_over_experts = (1.0 - by_autodiff) * parameters.whole_over_experts
    once_over_experts = once_over_experts + by_autodiff * parameters.outer_at_rest
    once = FLOAT32 * (1.0 - by_autodiff) * parameters.at_rest
    once = once + by_autodiff * units * sizes.itemsize * parameters.outer_at_rest
    after = by_autodiff * is_once * (parameters.at_rest - parameters.outer_at_rest)
    outer_scattered = scattered(float(not sizes.is_written_out))
    scatter: Number = _gradient_bytes(sizes) * moved * scattered(by_autodiff)
    gradient: Number = parameters.layer_at_rest * in_units + of_layer * over_experts
    if not sizes.engine.has_stages and grid.size("fsdp") > 1 and sharing > 1:
        # XLA sums whole gradients over all these axes at once, and cuts the sums.
        devices = sharing * grid.size("fsdp")
        joint = _joint(cost("data"), cost("context"), cost("fsdp"))
        of_all = 2 * (devices - 1) / devices * joint
        scatter = 0.0
        gradient = parameters.layer_gathered * of_all + of_layer * over_experts
    return Waits(
        gather=sizes.itemsize * moved * gathered,
        scatter=scatter,
        forward=summed + keys + exchanged,
        # Sums of keys' gradients are float32; keys of other devices are gathered again.
        backward=(summed + exchanged) * (1 + sizes.recomputed)
        + keys * (2.0 + np.greater(sizes.recomputed, 0)),
        gradient=by_autodiff * sizes.itemsize * gradient,
        permute=activations * machine.permute_cost(grid, links) * (sizes.stages > 1),
        reduction=once * summed_once
        + FLOAT32 * after * over_context
        + FLOAT32 * once_over_experts * over_experts,
        outer=sizes.itemsize * outer * _joint(gathered, cost("stage"))
        + _summed_bytes(sizes) * outer * _joint(outer_scattered, cost("stage")),
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
    cost = machine.gather_cost(grid, machine.links(grid), "fsdp")
    moved = (sizes.itemsize + FLOAT32) * count * (size - 1) / size
    return sizes.gathers("per_iteration") * moved * cost


def unit_waits(sizes: BlockSizes, units: Units, waits: Waits) -> tuple[Number, Number]:
    """Return the seconds that the F and the backward of a chunk wait for transfers."""
    layers = sizes.layers if sizes.engine.has_stages else 1.0
    each = sizes.gathers("per_iteration") if sizes.engine.has_stages else 1.0
    in_steps = sizes.gathers_in_steps()
    moved = (1.0 - sizes.keeps_gathered) * waits.gather + waits.scatter
    backward = units.input_gradient + units.weight_gradient
    # Where weights are gathered in the unit that reads them, the transfers follow its computation.
    before = in_steps * exposed(layers * waits.gather, 0.0, layers * units.forward)
    before += (1.0 - in_steps) * layers * waits.gather * sizes.gathers_of_unit()
    # A backward ends with attention, when most of the last layer's gradients are on their way.
    after = in_steps * exposed(layers * moved, 0.5 * waits.scatter, layers * backward)
    after += (1.0 - in_steps) * layers * moved
    in_backward = layers * (waits.backward + waits.gradient)
    return layers * waits.forward + each * before, in_backward + each * after


def _gradient_bytes(sizes: BlockSizes) -> Number:
    """Return the bytes of a gradient that is on its way to be summed up over fsdp."""
    # In steps the first goes as it was computed, to the neighbour that adds to it in float32.
    steps = max(sizes.block.grid.size("fsdp") - 1, 1)
    in_steps = (sizes.itemsize + FLOAT32 * (steps - 1)) / steps
    return np.where(sizes.gathers_in_steps(), in_steps, _summed_bytes(sizes))


def _summed_bytes(sizes: BlockSizes) -> float:
    """Return the bytes of a gradient that a collective sums up."""
    return FLOAT32 if sizes.is_written_out else sizes.itemsize


def _by_autodiff(sizes: BlockSizes) -> Number:
    """Return 1 where JAX differentiates the loop over layers or iterations, else 0."""
    if not sizes.engine.has_stages:
        return 1.0
    return 0.0 if sizes.is_written_out else sizes.gathers("per_iteration")


def _joint(*costs: Number) -> Number:
    """Return the seconds of a byte in collectives along several axes, which use all their links."""
    rates = [1 / cost for cost in costs if np.any(cost)]
    return 1 / sum(rates) if rates else 0.0
