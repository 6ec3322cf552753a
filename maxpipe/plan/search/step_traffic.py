"""Price what a step moves through a device's memory outside its units.

These are the optimizer's update, casts, sums and zeros, and the switches of the circular engine.
The rates are those of `traffic`.
"""

from maxpipe.plan.footprint import itemsize, update_bytes
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.memory import kept_columns
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.traffic import gradient_parameters
from maxpipe.plan.stores import FLOAT32, Number


def once_seconds(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the seconds of a step's memory traffic outside its units."""
    parameters = sizes.parameters
    wide = machine.stream_rate(FLOAT32)
    update = update_bytes(sizes.config) * sizes.weights.stored / wide
    seconds = update + _switch_seconds(sizes, machine)
    # Weights are cast once, or XLA moves the cast of all of them in front of the loops.
    is_cast_ahead: Number = float(sizes.config.model.narrows_parameters)
    if sizes.is_written_out and (sizes.is_split or not sizes.engine.one_program):
        is_cast_ahead = sizes.gathers_once
    cast = itemsize(sizes.config.model.param_dtype) + sizes.itemsize
    seconds = seconds + is_cast_ahead * cast * parameters.at_rest / wide
    if not sizes.engine.has_stages:
        several = 1.0 * (sizes.microbatches > 1)
        sums = several * 3 * FLOAT32 * parameters.at_rest / wide
        # With a loop over layers every microbatch starts from gradients of zero, and so do the sums
        # over microbatches.
        zeros = parameters.at_rest / machine.zeros_rate
        stacks = sizes.microbatches * (not sizes.is_unrolled)
        return seconds + sizes.microbatches * sums + (stacks + several) * zeros
    zeros = gradient_parameters(sizes, parameters) * sizes.repeats * sizes.layers
    by_layer = sizes.engine.is_differentiated and sizes.config.pipeline.scan_layers_per_stage
    if sizes.engine.one_program and (sizes.block.grid.size("tensor") > 1 or by_layer):
        # Stores that the partitioner splits are filled with zeros, and so are those that a loop
        # over layers saves, unless autodiff makes them.
        loops = sizes.engine.is_differentiated * sizes.gathers("per_iteration")
        zeros = zeros + (1.0 - loops) * sizes.tokens * kept_columns(sizes)
    return seconds + zeros / machine.zeros_rate


def _switch_seconds(sizes: BlockSizes, machine: Machine) -> Number:
    """Return the seconds that the stages of the circular engine take to switch between repeats.

    In each iteration of a switch they select the weights of either repeat, forwards and backwards,
    and add gradients to the sums of both.
    """
    if not sizes.engine.is_differentiated:
        return 0.0
    delay = sizes.config.pipeline.forwarding_delay
    iterations = (sizes.repeats - 1) * delay * (sizes.stages - 1)
    count = sizes.layers * sizes.parameters.layer_gathered
    selected = 2 * 3 * sizes.itemsize * count / machine.stream_rate(sizes.itemsize)
    added = 3 * FLOAT32 * count / machine.stream_rate(FLOAT32)
    return (1.0 - sizes.gathers("per_iteration")) * iterations * (selected + added)
