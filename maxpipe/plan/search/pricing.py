"""Price the whole product of meshes, schedules and options, and keep the fastest that fit."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.search.block import DIMENSIONS, Block, along, block_of
from maxpipe.plan.search.candidate import Candidate, candidate_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.memory import memory_bytes
from maxpipe.plan.search.seconds import Seconds
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.space import Grid, Space
from maxpipe.plan.search.timing import step_seconds


class Priced(NamedTuple):
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


FITTING_OF_BLOCK = 12  # how many of the fastest that fit are kept
NEARLY = 1.01  # times the fastest: a smaller difference than closed forms can tell


@dataclass
class Outcome:
    """The outcome of a search.

    Attributes:
      fitting: candidates within the memory, the fastest first.
      misfits: faster candidates that do not fit, the fastest first; of each block those that no
        other beats in both time and memory.
      fastest: seconds per sequence of the fastest candidate that fits.
      least: the candidate that needs the least memory; None if none is legal.
      tried: number of candidates.
      fallen: number of candidates that were dropped for each reason.
      priced_seconds: how long the search took.
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
      batches: global batches to try, in sequences.
      limit: bytes that a device may use; None if unknown.
    """
    started = time.perf_counter()
    outcome = Outcome()
    legality = Legality(space.config)
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
    """Yield each block's fastest candidates that fit as soon as it is priced; see `search`."""
    legality, counted = Legality(space.config), Outcome()
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
                if reason := reasons[grid] or unkept:
                    count = math.prod(block.shape)
                    outcome.tried += count
                    outcome.fallen += Counter({reason: count})  # no entry where count is 0
                else:
                    yield block


def _collect(outcome: Outcome, priced: Priced, facts: Facts, limit: float | None) -> None:
    """Keep the fastest candidates of a block, and those that would be faster with more memory."""
    block, legal, memory = priced.block, priced.legal, priced.memory
    per_sequence = np.asarray(priced.seconds.step) / block.batch
    fits = legal & (memory <= limit) if limit is not None else legal
    too_large = legal & ~fits
    if count := int(too_large.sum()):
        outcome.fallen["memory: more than the limit"] += count
    at = np.flatnonzero(fits)
    tiles = np.broadcast_to(along(block.tiles, "tiles"), block.shape).reshape(-1)
    order = _ranked(per_sequence[at], tiles[at], memory[at], has_limit=limit is not None)
    fitting = at[order][:FITTING_OF_BLOCK]
    outcome.fastest = min([outcome.fastest, *per_sequence[fitting]])
    at = np.flatnonzero(too_large & (per_sequence < outcome.fastest))
    misfits = at[_front(per_sequence[at], memory[at])]
    for ranked, places in ((outcome.fitting, fitting), (outcome.misfits, misfits)):
        ranked += [candidate_of(block, int(i), memory, priced.seconds, facts) for i in places]
    least = int(np.argmin(np.where(legal, memory, math.inf)))
    if outcome.least is None or memory[least] < outcome.least.memory:
        outcome.least = candidate_of(block, least, memory, priced.seconds, facts)


def _ranked(
    seconds: np.ndarray, tiles: np.ndarray, memory: np.ndarray, *, has_limit: bool
) -> np.ndarray:
    """Return places, the fastest first; equally fast ones by fewer tiles, then by less memory.

    Without a limit that keeps memory in bounds, the one with the least memory stands for all that
    are nearly as fast as the fastest.
    """
    if has_limit:
        return np.lexsort((memory, tiles, np.round(seconds, 9)))
    nearly = seconds <= NEARLY * seconds.min(initial=math.inf)
    order = np.lexsort((tiles, memory, np.where(nearly, 0.0, seconds)))
    return np.concatenate([order[:1], order[nearly.sum() :]]) if nearly.any() else order


def _front(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return the places of candidates that no other beats in both, the fastest first."""
    order = np.lexsort((memory, seconds))
    least = np.minimum.accumulate(memory[order])
    return order[np.diff(least, prepend=math.inf) < 0]
