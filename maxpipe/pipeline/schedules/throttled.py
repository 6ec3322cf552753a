"""Build a lockstep table under any cap on activations in flight: units run as soon as they may."""

import numpy as np

from maxpipe.pipeline.schedules.table import Table, from_ticks, stages_of_chunks


def throttled(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    placement: str,
    max_in_flight: int,
    splits_backward: bool,
) -> Table:
    """Build a lockstep table in which an F starts only if the stage's memory has room for it.

    There is room if afterwards the other forwards of the oldest microbatch that has any left on the
    stage still fit, so that it can pass all chunks and come back. Later chunks run first. A W runs
    in the tick of its I.

    Args:
      max_in_flight: most chunks in flight on a stage, at least `num_repeats`.
      splits_backward: whether backwards are I and W; otherwise B.
    """
    stage_of = stages_of_chunks(num_stages, num_repeats, placement).tolist()
    num_chunks, last = len(stage_of), len(stage_of) - 1
    chunks = [[c for c in range(num_chunks) if stage_of[c] == s] for s in range(num_stages)]
    forward = np.full((num_microbatches, num_chunks), -1)
    backward = np.full((num_microbatches, num_chunks), -1)
    forwards, backwards = [0] * num_chunks, [0] * num_chunks  # of each chunk, so far
    in_flight = [0] * num_stages
    tick = 0
    while min(backwards) < num_microbatches:
        # 1. F slots: the latest chunk that fits the memory and has its input.
        for stage in range(num_stages):
            room = max_in_flight - in_flight[stage]
            oldest = min(forwards[c] for c in chunks[stage])
            rest = sum(forwards[c] <= oldest for c in chunks[stage])
            for chunk in reversed(chunks[stage]):
                m = forwards[chunk]
                if m == num_microbatches or rest + (m > oldest) > room:
                    continue
                if chunk == 0 or 0 <= forward[m, chunk - 1] < tick:
                    forward[m, chunk] = tick
                    forwards[chunk] += 1
                    in_flight[stage] += 1
                    break
        # 2. Backward slots of the same tick; the last chunk may follow its own F at once.
        for stage in range(num_stages):
            for chunk in reversed(chunks[stage]):
                m = backwards[chunk]
                if m == forwards[chunk]:
                    continue
                if chunk == last or 0 <= backward[m, chunk + 1] < tick:
                    backward[m, chunk] = tick
                    backwards[chunk] += 1
                    in_flight[stage] -= 1
                    break
        tick += 1
    ticks = {"F": forward, "B": backward}
    if splits_backward:
        ticks = {"F": forward, "I": backward, "W": backward}
    return from_ticks(name, num_stages, num_repeats, ticks, placement=placement, lockstep=True)
