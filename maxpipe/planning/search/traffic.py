"""Price what a step moves through a device's memory besides the operands of matrix products.

The rates are those that XLA's estimates reach, see `devices.chips.MemoryShares`.

Letters: V repeats, M microbatches, L layers of a chunk.
"""

from typing import NamedTuple

from maxpipe.planning.footprint import itemsize
from maxpipe.planning.search.facts import Parameters
from maxpipe.planning.search.machine import Machine
from maxpipe.planning.search.memory import kept_columns
from maxpipe.planning.search.sizes import FLOAT32, BlockSizes, state_per_parameter
from maxpipe.planning.stores import Number


class Traffic(NamedTuple):
    """Seconds of one layer for one microbatch.

    Attributes:
      written, read: residuals, by F to a store and by the backward from it.
      forward, backward: weights that a unit casts, copies and gathers for itself.
      keys: keys and values of whole sequences, which their owners send in another order.
      gradients: sums of weight gradients.
    """

    written: Number
    read: Number
    forward: Number
    backward: Number
    keys: Number
    gradients: Number


def layer_traffic(
    sizes: BlockSizes, machine: Machine, parameters: Parameters, key_values: float, stored: Number
) -> Traffic:
    """Return what a layer of a model moves.

    Args:
      sizes: of the block.
      machine: that runs it.
      parameters: of the model.
      key_values: width of what attention reads besides queries.
      stored: width of the residuals that go to a store.
    """
    rate = machine.stream_rate(sizes.itemsize)
    # Programs of their own hand residuals over.
    each = sizes.engine.one_program * residual_seconds(sizes, machine, stored)
    forward, backward = _weights(sizes, machine, parameters)
    context = sizes.block.grid.size("context")
    sequence = sizes.itemsize * sizes.tokens * context * key_values * (context > 1)
    return Traffic(
        # What makes residuals writes them into the store; what reads them gets a copy.
        written=each,
        read=2 * each,
        forward=forward,
        backward=backward,
        # Once to the order of tokens and once to that of the kernel, each read and written.
        keys=2 * 2 * sequence / rate,
        gradients=_gradients(sizes, parameters) / machine.stream_rate(FLOAT32),
    )


def residual_seconds(sizes: BlockSizes, machine: Machine, stored: Number) -> Number:
    """Return the seconds in which residuals of a layer, of that width, are written or read."""
    return sizes.itemsize * sizes.tokens * stored / machine.stream_rate(sizes.itemsize)


def once_seconds(sizes: BlockSizes, machine: Machine) -> Number:
    """Return what a step moves besides its units: the optimizer's update, casts, sums, zeros."""
    parameters = sizes.parameters
    wide = machine.stream_rate(FLOAT32)
    state = state_per_parameter(sizes.config)
    seconds = (2 * state + FLOAT32) * parameters.at_rest / wide
    if not sizes.is_written_out:
        # XLA moves the cast of all weights in front of the loops.
        cast = itemsize(sizes.config.model.param_dtype) + sizes.itemsize
        seconds = seconds + cast * parameters.at_rest / wide
    if not sizes.engine.has_stages:
        several = 1.0 * (sizes.microbatches > 1)
        sums = several * 3 * FLOAT32 * parameters.at_rest / wide
        # Every microbatch begins with gradients of zero, and the sums begin so, too.
        zeros = parameters.at_rest / machine.zeros_rate
        return seconds + sizes.microbatches * (sums + zeros) + several * zeros
    zeros = _gradient_parameters(sizes, parameters) * sizes.repeats * sizes.layers
    if sizes.engine.lockstep:
        zeros = zeros + sizes.tokens * kept_columns(sizes)
    return seconds + zeros / machine.zeros_rate


def _weights(sizes: BlockSizes, machine: Machine, parameters: Parameters) -> tuple[Number, Number]:
    """Return the seconds in which F, and the backward, prepare the weights of a layer."""
    size, rate = sizes.itemsize, machine.stream_rate(sizes.itemsize)
    each = sizes.gathers("per_iteration") if sizes.engine.has_stages else 1.0
    is_gathered = parameters.layer_gathered > parameters.layer_at_rest
    gathered = each * is_gathered * size * parameters.layer_gathered / rate
    if sizes.is_written_out:
        stored = itemsize(sizes.config.model.param_dtype)
        cast = (stored + size) * parameters.layer_at_rest / machine.stream_rate(FLOAT32)
        return gathered + each * cast, gathered + each * cast
    copy = 2 * size * _gradient_parameters(sizes, parameters) / rate
    if not sizes.engine.has_stages:
        # A loop over layers reads forward weights in place, those of the backward from a copy.
        return gathered, gathered + copy * sizes.block.scans
    # A chunk is copied out of its stage's, and each of its layers out of the chunk.
    unrolled = (sizes.layers > 1) & (not sizes.config.pipeline.scan_layers_per_stage)
    copies = (sizes.repeats > 1) * copy + unrolled * copy
    return gathered + copies, gathered + copies


def _gradients(sizes: BlockSizes, parameters: Parameters) -> Number:
    """Return the bytes that move where a unit adds the gradients of a layer to their sums."""
    count = _gradient_parameters(sizes, parameters)
    if not sizes.engine.has_stages:
        return (sizes.itemsize + FLOAT32) * count  # the loop over layers puts them into a stack
    gradient = FLOAT32 if sizes.is_written_out else sizes.itemsize
    return (2 * FLOAT32 + gradient) * count


def _gradient_parameters(sizes: BlockSizes, parameters: Parameters) -> Number:
    """Return the parameters of a layer whose gradients one unit adds to a sum."""
    is_whole = sizes.gathers("once") if sizes.engine.has_stages else 0.0
    return is_whole * parameters.layer_gathered + (1.0 - is_whole) * parameters.layer_at_rest
