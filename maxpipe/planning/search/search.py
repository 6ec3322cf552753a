"""Search the whole product of meshes, schedules and options for the fastest that fit."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.planning.search.block import DIMENSIONS, Block, along, block_of
from maxpipe.planning.search.candidate import Candidate, candidate_of
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.machine import Machine
from maxpipe.planning.search.memory import memory_bytes
from maxpipe.planning.search.seconds import Seconds
from maxpipe.planning.search.sizes import BlockSizes
from maxpipe.planning.search.space import Grid, Space
from maxpipe.planning.search.timing import step_seconds

FITTING_OF_BLOCK = 12  # of the fastest that fit


class Priced(NamedTuple):
    """A block with the memory and the time of its candidates, as flat arrays."""

    block: Block
    legal: np.ndarray
    memory: np.ndarray
    seconds: Seconds


@dataclass
class Outcome:
    """What came of a search.

    Attributes:
      fitting: candidates within the memory, the fastest first.
      misfits: those that do not fit and are faster, the fastest first; of each block those that no
        other beats in both time and memory.
      fastest: seconds of a sequence of the fastest that fits.
      least: the one that needs least memory; None if none is legal.
      tried: number of candidates.
      fallen: how many fell for each reason.
      priced_seconds: how long it took.
    """

    fitting: list[Candidate] = field(default_factory=list)
    misfits: list[Candidate] = field(default_factory=list)
    fastest: float = math.inf
    least: Candidate | None = None
    tried: int = 0
    fallen: Counter[str] = field(default_factory=Counter)
    priced_seconds: float = 0.0


def search(
    space: Space, machine: Machine, facts: Facts, batches: list[int], limit: float | None
) -> Outcome:
    """Price every candidate and keep the fastest.

    Args:
      space: what is tried.
      machine: the devices.
      facts: of the model.
      batches: global batches to try, in sequences.
      limit: bytes that a device may use; None if unknown.
    """
    started = time.perf_counter()
    outcome = Outcome()
    legality = Legality(space.config, machine.hosts)
    for block in blocks(space, legality, batches, outcome):
        count = math.prod(block.shape)
        outcome.tried += count
        priced = price(block, legality, facts, machine, outcome.fallen)
        if priced is not None:
            _collect(outcome, priced, facts, limit)
    outcome.fitting.sort(key=lambda c: c.order)
    faster = (c for c in outcome.misfits if c.per_sequence < outcome.fastest)
    outcome.misfits = sorted(faster, key=lambda c: c.order)
    outcome.priced_seconds = time.perf_counter() - started
    return outcome


def fitting_of_blocks(
    space: Space, machine: Machine, facts: Facts, batches: list[int], limit: float | None
) -> Iterator[list[Candidate]]:
    """Yield the fastest of each block that fit, as soon as it is priced; see `search`."""
    legality, counted = Legality(space.config, machine.hosts), Outcome()
    for block in blocks(space, legality, batches, counted):
        of_block = Outcome(fastest=0.0)  # nothing is faster, so that no misfits are collected
        priced = price(block, legality, facts, machine, counted.fallen)
        if priced is not None:
            _collect(of_block, priced, facts, limit)
        yield of_block.fitting


def blocks(
    space: Space, legality: Legality, batches: list[int], outcome: Outcome
) -> Iterator[Block]:
    """Yield the blocks of legal meshes; count the candidates of the others."""
    reasons: dict[Grid, str] = {}
    for grid in space.grids():
        reasons[grid] = legality.of_mesh(grid)
        for engine, schedule in space.pipelines(grid.size("stage")):
            for batch, scans in itertools.product(batches, space.scans(engine)):
                block = block_of(space, legality, grid, engine, schedule, batch, scans=scans)
                unkept = space.unkept(engine, schedule)
                if reason := reasons[grid] or legality.of_engine(engine) or unkept:
                    outcome.tried += math.prod(block.shape)
                    outcome.fallen[reason] += math.prod(block.shape)
                else:
                    yield block


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
    drop(along(has_layers, "repeats"), "model.num_layers: does not divide over the chunks")
    fits, divides = legality.of_batch(block.engine, block.grid, block.batch, block.microbatches)
    drop(along(fits, "microbatches"), "pipeline.num_microbatches: not whole rounds of the stages")
    drop(along(divides, "microbatches"), "data.global_batch_size: does not divide")
    for p, policy in enumerate(block.policies):
        for g, gather in enumerate(block.gathers):
            if reason := legality.of_options(block.engine, block.schedule, policy, gather):
                passes = np.ones((len(block.policies), len(block.gathers), 1))
                passes[p, g] = 0
                drop(passes, reason)
    return legal


def _narrowed(block: Block, legal: np.ndarray) -> tuple[Block, np.ndarray]:
    """Leave out the numbers of microbatches and repeats of which no candidate is legal."""
    m = legal.any(axis=tuple(range(1, len(DIMENSIONS))))
    v = legal.any(axis=(0, *range(2, len(DIMENSIONS))))
    narrowed = block._replace(
        microbatches=block.microbatches[m],
        repeats=block.repeats[v],
        chunk=block.chunk[v],
        outside=block.outside[v],
    )
    return narrowed, legal[m][:, v]


def _collect(outcome: Outcome, priced: Priced, facts: Facts, limit: float | None) -> None:
    """Keep the fastest candidates of a block, and those that would be faster with more memory."""
    block, legal, memory = priced.block, priced.legal, priced.memory
    per_sequence = np.asarray(priced.seconds.step) / block.batch
    fits = legal & (memory <= limit) if limit is not None else legal
    too_large = legal & ~fits
    if count := int(too_large.sum()):
        outcome.fallen["memory: more than the limit"] += count
    at = np.flatnonzero(fits)
    # Of equally fast ones first the one with fewer tiles, then the one of less memory.
    tiles = np.broadcast_to(along(block.tiles, "tiles"), block.shape).reshape(-1)
    order = np.lexsort((memory[at], tiles[at], np.round(per_sequence[at], 9)))
    fitting = at[order][:FITTING_OF_BLOCK]
    outcome.fastest = min([outcome.fastest, *per_sequence[fitting]])
    at = np.flatnonzero(too_large & (per_sequence < outcome.fastest))
    misfits = at[_front(per_sequence[at], memory[at])]
    for ranked, places in ((outcome.fitting, fitting), (outcome.misfits, misfits)):
        ranked += [candidate_of(block, int(i), memory, priced.seconds, facts) for i in places]
    least = int(np.argmin(np.where(legal, memory, math.inf)))
    if outcome.least is None or memory[least] < outcome.least.memory:
        outcome.least = candidate_of(block, least, memory, priced.seconds, facts)


def _front(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return the places of those that no other beats in both, the fastest first."""
    order = np.lexsort((memory, seconds))
    least = np.minimum.accumulate(memory[order])
    return order[np.diff(least, prepend=math.inf) < 0]
