"""Search the whole product of meshes, schedules and options for the fastest that fit."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from maxpipe.plan.search.block import Block, along, block_of
from maxpipe.plan.search.candidate import Candidate, candidate_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.pricing import Priced, price
from maxpipe.plan.search.space import Grid, Space

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
      space: what is tried.
      machine: the devices.
      facts: sizes and costs of the model.
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
