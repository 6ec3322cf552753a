"""Compute the times of a block's transfers: of weights, gradients, activations and tokens."""

import math
from typing import NamedTuple

import numpy as np

from maxpipe.config.sections import MESH_AXES
from maxpipe.plan.number import FLOAT32, Number
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.unit_seconds import Units
from maxpipe.sharding.collectives import EXPERT_AXIS


class Waits(NamedTuple):
    """Seconds of transfers of one layer or one microbatch, as if nothing hid them.

    Attributes:
      gather: gather of a layer's weights.
      scatter: sum of a layer's gradients over the devices that share its weights.
      forward, backward: transfers of activations in a layer, which the next product waits for.
      gradient: sum of a layer's gradients over copies of its weights, where every unit has one.
      permute: transfer of activations to the next stage.
      reduction: sum of the other gradients over copies of the parameters, once a step.
      outer: gathers and sums of embedding and head, once.
    """

    gather: Number
    scatter: Number
    forward: Number
    backward: Number
    gradient: Number
    permute: Number
    reduction: Number
    outer: Number


class _Costs:
    """Seconds per byte in collectives along the axes of a block's mesh; 0 along one of size 1."""

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
    costs = _Costs(sizes, machine)
    gather, scatter, outer = _weight_waits(sizes, costs)
    forward, backward = _activation_waits(sizes, costs)
    gradient, reduction = _gradient_waits(sizes, costs)
    activations = sizes.tokens * sizes.itemsize * sizes.config.model.embed_dim
    return Waits(
        gather=gather,
        scatter=scatter,
        forward=forward,
        backward=backward,
        gradient=gradient,
        permute=activations * costs.permute,
        reduction=reduction,
        outer=outer,
    )


def _weight_waits(sizes: BlockSizes, costs: _Costs) -> tuple[Number, Number, Number]:
    """Return the seconds to gather a layer, to scatter its gradients, and both for the ends.

    The ends are embedding and head. Both take all links along fsdp and stage, or along fsdp where
    each lies on one stage.
    """
    parameters, at_rest = sizes.parameters, sizes.parameters.outer_at_rest
    # The network between slices is no further link.
    by_stages = 0.0 if costs.crosses_stages else costs.of("stage")
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
        ends * sizes.itemsize * _joint(costs.gather, by_stages)
        + ends * summed * _joint(scatter_ends, by_stages),
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
    keys_backward = keys * (2.0 + np.greater(sizes.saving.recomputed, 0))
    return again + keys, again * (1 + sizes.saving.recomputed) + keys_backward


def _gradient_waits(sizes: BlockSizes, costs: _Costs) -> tuple[Number, Number]:
    """Return the seconds to sum a layer's gradients over copies in a unit, and others in a step.

    Copies are on devices with the same weights and other tokens. Where autodiff makes units sum the
    gradients of layers, only those of embedding and head remain for the step.
    """
    parameters, by_autodiff = sizes.parameters, _by_autodiff(sizes)
    of_copies = costs.of_sum("data", "context")
    layers = parameters.at_rest - parameters.outer_at_rest
    in_step = parameters.outer_at_rest + (1.0 - by_autodiff) * layers
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


def _joint(*costs: Number) -> Number:
    """Return the seconds per byte in collectives along several axes, which use all their links."""
    rates = [1 / cost for cost in costs if np.any(cost)]
    return 1 / sum(rates) if rates else 0.0


def _exposed(transfer: Number, last: Number, compute: Number) -> Number:
    """Return the seconds that computation does not hide of transfers that run during it.

    Args:
      transfer: seconds of all of a unit's transfers.
      last: the part of them that comes after all computation.
      compute: seconds of the unit's computation.
    """
    return last + np.maximum(np.subtract(transfer - last, compute), 0.0)
