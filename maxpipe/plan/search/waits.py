"""Compute the times of a block's transfers: of weights, gradients, activations and tokens."""

import math

import numpy as np

from maxpipe.config.sections import MESH_AXES
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.seconds import Units, Waits, exposed
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.stores import FLOAT32, Number
from maxpipe.sharding.collectives import EXPERT_AXIS


class _Costs:
    """Seconds per byte in collectives along the axes of a block's mesh; 0 along one of size 1.

    Args:
      sizes: sizes and counts of the block's candidates.
      machine: the devices.
    """

    def __init__(self, sizes: BlockSizes, machine: Machine):
        self._grid = grid = sizes.block.grid
        links = machine.links(grid)
        self._each = {
            axis: machine.collective_cost(grid, links, axis) if grid.size(axis) > 1 else 0.0
            for axis in MESH_AXES
        }
        self.gather = machine.gather_cost(grid, links, "fsdp") if grid.size("fsdp") > 1 else 0.0
        self.permute = machine.permute_cost(grid, links) if grid.size("stage") > 1 else 0.0
        self.crosses_stages = grid.dcn[MESH_AXES.index("stage")] > 1
        self._sums_whole = machine.sums_whole(grid, "fsdp")
        is_whole_torus = machine.is_whole_torus(grid, links, "fsdp")
        self._scatter = self.gather if is_whole_torus else self._each["fsdp"]

    def of(self, axis: str) -> float:
        """Return the seconds per byte along an axis."""
        return self._each[axis]

    def of_sum(self, *axes: str) -> Number:
        """Return the seconds per byte of a sum over n devices: 2 (n - 1) / n, over all links."""
        count = math.prod(map(self._grid.size, axes))
        return 2 * (count - 1) / count * _joint(*(self._each[axis] for axis in axes))

    def scatter(self, by_partitioner: Number) -> Number:
        """Return the seconds per byte of a gradient that is summed over fsdp and cut.

        Over most whole slices the partitioner sums whole gradients, see `Machine.sums_whole`.
        """
        by_sums = by_partitioner * self._sums_whole
        return by_sums * 2 * self.of("fsdp") + (1.0 - by_sums) * self._scatter


def waits_of(sizes: BlockSizes, machine: Machine) -> Waits:
    """Return the seconds of transfers."""
    costs, parameters = _Costs(sizes, machine), sizes.parameters
    activations = sizes.tokens * sizes.itemsize * sizes.config.model.embed_dim
    forward, backward = _activation_waits(sizes, costs)
    scatter, gradient = _gradient_waits(sizes, costs)
    return Waits(
        gather=sizes.itemsize
        * (parameters.layer_gathered - parameters.layer_at_rest)
        * costs.gather,
        scatter=scatter,
        forward=forward,
        backward=backward,
        gradient=gradient,
        permute=activations * costs.permute,
        reduction=_reduction_wait(sizes, costs),
        outer=_outer_wait(sizes, costs),
        dealt=_dealt_wait(sizes, costs, activations),
        outside=_outside_wait(sizes, costs),
    )


def _activation_waits(sizes: BlockSizes, costs: _Costs) -> tuple[Number, Number]:
    """Return the seconds of a layer's transfers of activations, forwards and backwards.

    With A bytes of activations (A' in float32), K bytes of keys and values, and c(axis) the seconds
    per byte along an axis, a forward takes

        2 A c(sum over tensor) + K (context - 1) c(context) + (A + A') (expert - 1) c(expert)

    since layers sum twice, and every device gets the tokens of all devices with other experts and
    sends sums back. A backward takes as long, and again for the share that it recomputes; but keys
    are gathered again if it recomputes anything, and their gradients are summed in float32.
    """
    grid, embed = sizes.block.grid, sizes.config.model.embed_dim
    activations = sizes.tokens * sizes.itemsize * embed
    summed = 2 * activations * costs.of_sum("tensor")
    others = grid.size("context") - 1
    keys = sizes.tokens * sizes.itemsize * sizes.layer.key_values * others * costs.of("context")
    exchanged = activations + sizes.tokens * FLOAT32 * embed
    exchanged = exchanged * (grid.size(EXPERT_AXIS) - 1) * costs.of(EXPERT_AXIS)
    again = summed + exchanged
    keys_backward = keys * (2.0 + np.greater(sizes.recomputed, 0))
    return again + keys, again * (1 + sizes.recomputed) + keys_backward


def _gradient_waits(sizes: BlockSizes, costs: _Costs) -> tuple[Number, Number]:
    """Return the seconds in which units sum a layer's gradients: over fsdp, and over copies.

    With G and L weights of a layer, gathered and at rest, of which O of G belong to no expert, and
    b and g bytes per gradient, the first takes b (G - L) c(scatter); the second, where autodiff
    makes units sum, takes g (L c(sum over data and context) + O / fsdp c(sum over expert)).
    """
    grid, parameters = sizes.block.grid, sizes.parameters
    by_autodiff, fsdp = _by_autodiff(sizes), grid.size("fsdp")
    gathered = parameters.layer_gathered
    shared = (gathered - sizes.layer.expert_weights) / fsdp * costs.of_sum(EXPERT_AXIS)
    if not sizes.engine.has_stages and fsdp > 1 and grid.size("data") * grid.size("context") > 1:
        # XLA sums whole gradients over all these axes at once, and cuts the sums.
        of_all = gathered * costs.of_sum("data", "context", "fsdp")
        return 0.0, by_autodiff * sizes.itemsize * (of_all + shared)
    moved = gathered - parameters.layer_at_rest
    scatter = _gradient_bytes(sizes) * moved * costs.scatter(by_autodiff)
    over_copies = np.where(
        _sums_context_once(sizes), costs.of_sum("data"), costs.of_sum("data", "context")
    )
    gradient = parameters.layer_at_rest * over_copies + shared
    return scatter, by_autodiff * sizes.itemsize * gradient


def _reduction_wait(sizes: BlockSizes, costs: _Costs) -> Number:
    """Return the seconds in which gradients are summed over copies once a step.

    These are all gradients, in float32. Where autodiff makes units sum those of layers, only those
    of embedding and head remain, in the dtype of activations (for each microbatch without stages),
    and over context those of layers that a loop over several repeats sums. Over fsdp they are those
    of parameters that it does not divide.
    """
    parameters, by_autodiff = sizes.parameters, _by_autodiff(sizes)
    outer, all_others = parameters.outer_at_rest, parameters.at_rest - parameters.outer_at_rest
    times = 1.0 if sizes.engine.has_stages else sizes.microbatches
    over_copies = FLOAT32 * (1.0 - by_autodiff) * parameters.at_rest
    over_copies = over_copies + by_autodiff * times * sizes.itemsize * outer
    over_context = FLOAT32 * by_autodiff * _sums_context_once(sizes) * all_others
    over_fsdp = FLOAT32 * (1.0 - by_autodiff) + by_autodiff * sizes.microbatches * sizes.itemsize
    over_experts = (1.0 - by_autodiff) * parameters.whole_over_experts + by_autodiff * outer
    return (
        over_copies * costs.of_sum("data", "context")
        + over_context * costs.of_sum("context")
        + FLOAT32 * over_experts * costs.of_sum(EXPERT_AXIS)
        + over_fsdp * parameters.whole_over_fsdp * costs.of_sum("fsdp")
    )


def _outer_wait(sizes: BlockSizes, costs: _Costs) -> Number:
    """Return the seconds in which embedding and head are gathered and their gradients summed.

    Both take all links along fsdp and stage, or along fsdp where each lies on one stage. Stages in
    other slices exchange shards, see `sharding.torus`.
    """
    parameters, over_stages = sizes.parameters, costs.of("stage")
    at_rest = parameters.outer_at_rest
    if not sizes.engine.one_program:
        over_stages, at_rest = 0.0, parameters.embed_of_stage + parameters.head_of_stage
    moved = parameters.embed_gathered + parameters.head_gathered - at_rest
    scatter, summed = costs.scatter(float(not sizes.is_written_out)), _summed_bytes(sizes)
    if over_stages and costs.crosses_stages:
        # Lockstep engines look up columns of the embedding where they lie.
        projection = sizes.weights.projection
        share = projection / (moved + at_rest) if sizes.engine.lockstep else 1.0
        # Rules may leave these whole over stages.
        across = (parameters.embed_of_stage + parameters.head_of_stage - at_rest) * share
        within = sizes.itemsize * costs.gather + summed * scatter
        return across * (sizes.itemsize + summed) * over_stages + (moved - across) * within
    gathered = sizes.itemsize * _joint(costs.gather, over_stages)
    return moved * (gathered + summed * _joint(scatter, over_stages))


def _outside_wait(sizes: BlockSizes, costs: _Costs) -> Number:
    """Return the seconds in which a layer outside the pipeline is gathered and summed in a step.

    It is split over fsdp and stage. A lockstep engine gathers it once a step, or for the forward
    and for the backward of each microbatch, and sums its gradients once or for each microbatch. The
    circular engine gathers it once for all forwards and once for all backwards; for each microbatch
    of a stage autodiff sums whole gradients over all devices with other microbatches.
    """
    if not (sizes.engine.has_stages and sizes.engine.one_program):
        return 0.0
    parts, over_stages = sizes.parameters.parts, costs.of("stage")
    whole, at_rest = parts.layer_gathered, parts.outside_layer
    # Stages in other slices exchange shards.
    across = (parts.layer_at_rest - at_rest) * costs.crosses_stages
    jointly = 0.0 if costs.crosses_stages else over_stages

    def seconds(size: float, over_fsdp: Number) -> Number:
        within = (whole - at_rest - across) * _joint(over_fsdp, jointly)
        return size * (across * over_stages + within)

    gather = seconds(sizes.itemsize, costs.gather)
    if not sizes.engine.lockstep:
        summed = whole * costs.of_sum("data", "context", "fsdp", "stage")
        return 2 * gather + sizes.microbatches / sizes.stages * sizes.itemsize * summed
    each = sizes.gathers("per_iteration")
    times = 1.0 + each * (sizes.microbatches - 1.0)
    return times * ((1.0 + each) * gather + seconds(FLOAT32, costs.scatter(0.0)))


def _dealt_wait(sizes: BlockSizes, costs: _Costs, activations: Number) -> Number:
    """Return the seconds in which stages in other slices get their part of embedding and head.

    Lockstep engines spread embedding and head over the stages: activations are joined after the
    lookup, dealt before the head, and their gradients the other way around. Within a slice that
    takes about a per cent of a step, and is left out.
    """
    if not (sizes.engine.lockstep and costs.crosses_stages):
        return 0.0
    return 4 * activations * (sizes.stages - 1) / sizes.stages * costs.of("stage")


def _sums_context_once(sizes: BlockSizes) -> Number:
    """Return 1 where a differentiated loop over several repeats sums once over context, else 0."""
    return sizes.engine.has_stages * np.greater(sizes.repeats, 1)


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
    """Return the bytes of a gradient on its way to be summed over fsdp."""
    # In steps the first goes as it was computed; the neighbour adds to it in float32.
    steps = max(sizes.block.grid.size("fsdp") - 1, 1)
    in_steps = (sizes.itemsize + FLOAT32 * (steps - 1)) / steps
    return np.where(sizes.gathers_in_steps(), in_steps, _summed_bytes(sizes))


def _summed_bytes(sizes: BlockSizes) -> float:
    """Return the bytes of a gradient that a collective sums."""
    return FLOAT32 if sizes.is_written_out else sizes.itemsize


def _by_autodiff(sizes: BlockSizes) -> Number:
    """Return 1 where JAX differentiates the loop over layers or iterations, else 0."""
    if not sizes.engine.has_stages:
        return 1.0
    return 0.0 if sizes.is_written_out else sizes.gathers("per_iteration")


def _joint(*costs: Number) -> Number:
    """Return the seconds per byte in collectives along several axes, which use all their links."""
    rates = [1 / cost for cost in costs if np.any(cost)]
    return 1 / sum(rates) if rates else 0.0
