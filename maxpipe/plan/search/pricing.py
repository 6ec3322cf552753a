"""Price the whole product of meshes, schedules and options, and keep the fastest that fit."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.block import Block, BlockSizes, block_of
from maxpipe.plan.search.candidate import Candidate, candidate_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import Machine
from maxpipe.plan.search.memory import memory_bytes
from maxpipe.plan.search.space import Space
from maxpipe.plan.search.timing import step_seconds

FITTING_OF_BLOCK = 12  # how many of the fastest that fit are kept
NEARLY = 1.01  # times the fastest: a smaller difference than closed forms can tell


class Priced(NamedTuple):
    """Legal candidates with the bytes of a device, float [N], and seconds of a step, [N] each."""

    block: Block
    memory: np.ndarray
    seconds: Seconds

    def candidates(self, places: Iterable[int], facts: Facts) -> list[Candidate]:
        return [
            candidate_of(
                self.block,
                place,
                facts.config.model.stacked_layers,
                float(self.memory[place]),
                Seconds(*(float(np.asarray(part)[place]) for part in self.seconds)),
            )
            for place in places
        ]

    @property
    def per_sequence(self) -> np.ndarray:
        return np.asarray(self.seconds.step) / self.block.batch


@dataclass
class Outcome:
    """The outcome of a search.

    Misfits are faster candidates that do not fit; of each block those that no other beats in both
    time and memory.
    """

    fitting: list[Candidate] = field(default_factory=list)  # within the memory, the fastest first
    misfits: list[Candidate] = field(default_factory=list)  # the fastest first
    fastest: float = math.inf  # seconds per sequence of the fastest that fits
    least: Candidate | None = None  # needs the least memory; None if none is legal
    tried: int = 0
    fallen: Counter[str] = field(default_factory=Counter)  # dropped for each reason
    priced_seconds: float = 0.0


def search(
    space: Space, machine: Machine, facts: Facts, batches: Sequence[int], limit: float | None
) -> Outcome:
    """Price every candidate and keep the fastest that need at most `limit` bytes of a device."""
    started = time.perf_counter()
    outcome = Outcome()
    for priced in priced_blocks(space, machine, facts, batches, outcome):
        _collect(outcome, priced, facts, limit)
    outcome.fitting.sort(key=lambda c: c.order)
    faster = (c for c in outcome.misfits if c.per_sequence < outcome.fastest)
    outcome.misfits = sorted(faster, key=lambda c: c.order)
    outcome.priced_seconds = time.perf_counter() - started
    return outcome


def priced_blocks(
    space: Space, machine: Machine, facts: Facts, batches: Sequence[int], outcome: Outcome
) -> Iterator[Priced]:
    """Yield the legal candidates of each block; count all of them, and those that are not legal."""
    legality = Legality(space.config)
    for grid in space.grids():
        refusal = legality.of_mesh(grid)
        for engine, schedule in space.pipelines(grid.size("stage")):
            for batch, scans in itertools.product(batches, space.scans(engine)):
                block = block_of(space, grid, engine, schedule, batch, scans=scans)
                outcome.tried += len(block)
                if reason := refusal or space.unkept(engine, schedule):
                    outcome.fallen += Counter({reason: len(block)})  # no entry where it is 0
                elif priced := price(block, legality, facts, machine, outcome.fallen):
                    yield priced


def price(
    block: Block, legality: Legality, facts: Facts, machine: Machine, fallen: Counter[str]
) -> Priced | None:
    """Return a block's legal candidates with memory and time; None if there are none."""
    block = only_legal(block, legality, fallen)
    if not len(block):
        return None
    sizes = BlockSizes(block, facts, machine.tpu)
    try:
        numbers = (memory_bytes(sizes), *step_seconds(sizes, machine))
    except ScheduleError as error:
        fallen[f"pipeline.schedule: {'; '.join(error.reasons)}"] += len(block)
        return None
    memory, *seconds = (np.broadcast_to(number, len(block)) for number in numbers)
    return Priced(block, memory, Seconds(*seconds))


def only_legal(block: Block, legality: Legality, fallen: Counter[str]) -> Block:
    """Return the candidates that are legal on a legal mesh; count the others."""
    legal = np.ones(len(block), bool)

    def drop(passes: np.ndarray, reason: str) -> None:
        lost = legal & ~passes
        if count := int(lost.sum()):
            fallen[reason] += count
            legal[lost] = False

    config, engine, shards = legality.config, ENGINES[block.engine], block.grid.batch_shards
    drop(block.chunk > 0, "model.num_layers: fewer layers than stages x repeats")
    size = config.eval.global_batch_size if config.eval.every else -1
    evaluates = np.array(size in (-1, block.batch) or size % shards == 0)
    drop(evaluates, "eval.global_batch_size: no multiple of the devices that divide it")
    if engine.has_stages and engine.whole_rounds:
        stages = block.grid.size("stage")
        least = stages * config.pipeline.forwarding_delay
        rounds = (block.microbatches % stages == 0) & (block.microbatches >= least)
        drop(rounds, "pipeline.num_microbatches: not whole rounds of the stages")
    divided = "pipeline.num_microbatches x the devices that divide it"
    divides = block.batch % (block.microbatches * shards) == 0
    drop(divides, f"data.global_batch_size: no multiple of {divided}")
    for (p, policy), (g, gather) in itertools.product(
        enumerate(block.policies), enumerate(block.gathers)
    ):
        if reason := legality.of_options(block.engine, block.schedule, policy, gather):
            drop((block.policy != p) | (block.gather != g), reason)
    return block.only(legal)


def fitting_of(priced: Priced, limit: float | None) -> np.ndarray:
    """Return the places of a block's fastest candidates that fit, the fastest first.

    Equally fast ones are ranked by fewer tiles, then by less memory. Without a limit that keeps
    memory in bounds, the one with the least memory stands for all that are nearly as fast as the
    fastest.
    """
    at = np.arange(len(priced.block))
    if limit is not None:
        at = at[priced.memory <= limit]
    seconds, tiles, memory = priced.per_sequence[at], priced.block.tiles[at], priced.memory[at]
    if limit is not None:
        order = np.lexsort((memory, tiles, np.round(seconds, 9)))
    else:
        nearly = seconds <= NEARLY * seconds.min()
        order = np.lexsort((tiles, memory, np.where(nearly, 0.0, seconds)))
        order = np.concatenate([order[:1], order[nearly.sum() :]])
    return at[order][:FITTING_OF_BLOCK]


def _collect(outcome: Outcome, priced: Priced, facts: Facts, limit: float | None) -> None:
    """Keep the fastest candidates of a block, and those that would be faster with more memory."""
    memory, per_sequence = priced.memory, priced.per_sequence
    fitting = fitting_of(priced, limit)
    outcome.fitting += priced.candidates(fitting, facts)
    outcome.fastest = min([outcome.fastest, *per_sequence[fitting]])
    if limit is not None and (count := int((memory > limit).sum())):
        outcome.fallen["memory: more than the limit"] += count
        at = np.flatnonzero((memory > limit) & (per_sequence < outcome.fastest))
        at = at[np.lexsort((memory[at], per_sequence[at]))]
        # Those that no other beats in both time and memory.
        least = np.minimum.accumulate(memory[at])
        outcome.misfits += priced.candidates(at[np.diff(least, prepend=math.inf) < 0], facts)
    smallest = int(np.argmin(memory))
    if outcome.least is None or memory[smallest] < outcome.least.memory:
        (outcome.least,) = priced.candidates([smallest], facts)
