"""Compute the step of a block's candidates: units and transfers, as the schedule runs them.

Letters: F, I, W times of a chunk's forward, input gradient and weight gradient; S stages,
V repeats, M microbatches.
"""

import numpy as np

from maxpipe.plan.number import Number
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.seconds import Seconds
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.traffic import once_seconds
from maxpipe.plan.search.unit_seconds import Units, first_layers, units_of
from maxpipe.plan.search.waits import Waits, unit_waits, waits_of


def step_seconds(sizes: BlockSizes, machine: Machine) -> Seconds:
    """Return the predicted step of each candidate, means of all stages."""
    units, waits = units_of(sizes, machine), waits_of(sizes, machine)
    count = sizes.microbatches
    pipelined = sizes.repeats * sizes.layers * units.layer
    outside = sizes.outside * units.layer + first_layers(sizes, machine)
    outside = outside * _share_of_outside(sizes)
    products = count * (pipelined + outside + units.head) + once_seconds(sizes, machine)
    bubble = _bubble(sizes, units, waits)
    if sizes.engine.has_stages and not sizes.engine.one_program:
        # One stage runs these while the others are idle.
        ends = count * (outside + units.head) * (1.0 - 1.0 / sizes.stages)
        products, bubble = products - ends, bubble + ends
    return Seconds(products, _communication(sizes, units, waits), bubble)


def _share_of_outside(sizes: BlockSizes) -> Number:
    """Return a device's share of the work of layers outside the pipeline.

    One program divides it among the stages, lockstep engines by whole sequences.
    """
    if not sizes.engine.one_program:
        return 1.0
    if not sizes.engine.lockstep:
        return 1.0 / sizes.stages
    return sizes.lockstep_share()


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
    transfers: Number = 0.0
    if sizes.engine.has_stages:
        transfers = sizes.of_pattern("transfers") * waits.permute
    if sizes.engine.lockstep:
        transfers = transfers + _late_transfers(sizes, units, waits)
    # Embedding and head are gathered for every microbatch, or once by mode or with a conveyor.
    times = 1.0 if sizes.engine.is_differentiated else sizes.microbatches
    if sizes.engine.has_stages and not sizes.engine.is_differentiated:
        times = 1.0 + sizes.gathers("per_iteration") * (times - 1.0)
    once = waits.reduction + times * waits.outer
    # In layers outside the pipeline activations travel as in others, for a device's share of them.
    in_outside = sizes.outside * _share_of_outside(sizes) * (waits.forward + waits.backward)
    return per_unit + gathered + transfers + once + sizes.microbatches * in_outside


def _late_transfers(sizes: BlockSizes, units: Units, waits: Waits) -> Number:
    """Return the seconds that ticks of F and B wait, where transfers take longer than units.

    Activations travel during the B of their tick, gradients during the next F, and with delayed
    forwarding both have a whole tick.
    """
    forward = sizes.layers * units.forward
    backward = sizes.layers * (units.input_gradient + units.weight_gradient)
    times = [forward, backward]
    if sizes.config.pipeline.forwarding_delay > 1:
        times = 2 * [forward + backward]
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
