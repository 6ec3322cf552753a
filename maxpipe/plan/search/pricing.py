"""Price the legal candidates of a block: memory of a device, and seconds of a step."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.search.block import DIMENSIONS, Block, along
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.memory import memory_bytes
from maxpipe.plan.search.seconds import Seconds
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.timing import step_seconds


class Priced(NamedTuple):
    """A block with the memory and the time of its candidates, as flat arrays."""

    block: Block
    legal: np.ndarray
    memory: np.ndarray
    seconds: Seconds


def price(
    block: Block, legality: Legality, facts: Facts, machine: Machine, fallen: Counter[str]
) -> Priced | None:
    """Return the memory and time of a block's candidates; None if none is legal."""
    legal = legal_mask(block, legality, fallen)
    if not legal.any():
        return None
    block, legal = _narrowed(block, legal)
    sizes = BlockSizes(block, facts, machine.tpu)
    try:
        memory, seconds = memory_bytes(sizes), step_seconds(sizes, machine)
    except ScheduleError as error:
        fallen[f"pipeline.schedule: {'; '.join(error.reasons)}"] += int(legal.sum())
        return None
    flat = [np.broadcast_to(values, block.shape).reshape(-1) for values in (memory, *seconds)]
    return Priced(block, legal.reshape(-1), flat[0], Seconds(*flat[1:]))


def legal_mask(block: Block, legality: Legality, fallen: Counter[str]) -> np.ndarray:
    """Return which candidates are legal, bool of the block's shape; count the others."""
    legal = np.ones(block.shape, bool)

    def drop(passes: np.ndarray, reason: str) -> None:
        lost = legal & ~np.broadcast_to(passes > 0, legal.shape)
        if count := int(lost.sum()):
            fallen[reason] += count
            legal[lost] = False

    stages = block.grid.size("stage")
    has_layers, _, _ = legality.of_layers(block.engine, block.schedule, stages, block.repeats)
    drop(along(has_layers, "repeats"), "model.num_layers: fewer layers than stages x repeats")
    evaluates = np.array(legality.divides_evaluation(block.grid, block.batch))
    drop(evaluates, "eval.global_batch_size: no multiple of the devices that divide it")
    fits, divides = legality.of_batch(block.engine, block.grid, block.batch, block.microbatches)
    drop(along(fits, "microbatches"), "pipeline.num_microbatches: not whole rounds of the stages")
    shares = "pipeline.num_microbatches x the devices that divide it"
    drop(along(divides, "microbatches"), f"data.global_batch_size: no multiple of {shares}")
    for p, policy in enumerate(block.policies):
        for g, gather in enumerate(block.gathers):
            if reason := legality.of_options(block.engine, block.schedule, policy, gather):
                passes = np.ones((len(block.policies), len(block.gathers), 1))
                passes[p, g] = 0
                drop(passes, reason)
    return legal


def _narrowed(block: Block, legal: np.ndarray) -> tuple[Block, np.ndarray]:
    """Leave out the numbers of microbatches and repeats for which no candidate is legal."""
    m = legal.any(axis=tuple(range(1, len(DIMENSIONS))))
    v = legal.any(axis=(0, *range(2, len(DIMENSIONS))))
    narrowed = block._replace(
        microbatches=block.microbatches[m],
        repeats=block.repeats[v],
        chunk=block.chunk[v],
        outside=block.outside[v],
    )
    return narrowed, legal[m][:, v]
