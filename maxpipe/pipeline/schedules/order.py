"""Order units on each stage, and place them in the free-running table that follows.

A unit is a tuple (kind, microbatch, global chunk); an order is the list of a stage's units.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from maxpipe.pipeline.schedules.table import (
    KINDS,
    ScheduleError,
    Table,
    Unit,
    from_ticks,
    stages_of_chunks,
)

RawUnit = tuple[str, int, int]
Item = TypeVar("Item")


def one_forward_one_backward(
    forwards: Sequence[Item], backwards: Sequence[Item], num_warmup: int
) -> Iterator[Item]:
    """Yield `num_warmup` forwards, then forward and backward in turn, then the other backwards.

    >>> order = one_forward_one_backward(["F0", "F1", "F2"], ["B0", "B1", "B2"], num_warmup=1)
    >>> " ".join(order)
    'F0 F1 B0 F2 B1 B2'
    """
    yield from forwards[:num_warmup]
    steady = forwards[num_warmup:]
    for forward, backward in zip(steady, backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(steady) :]


def with_weight_gradients(units: Iterable[RawUnit], lag: int) -> Iterator[RawUnit]:
    """Yield F and I, and after each I the W of the I that was `lag` before it; then the rest.

    >>> units = [("F", 0, 0), ("F", 1, 0), ("I", 0, 0), ("F", 2, 0), ("I", 1, 0), ("I", 2, 0)]
    >>> order = with_weight_gradients(units, lag=1)
    >>> " ".join(f"{kind}{microbatch}" for kind, microbatch, _ in order)
    'F0 F1 I0 F2 I1 W0 I2 W1 W2'
    """
    due: list[RawUnit] = []
    for unit in units:
        yield unit
        if unit[0] == "I":
            due.append(("W", *unit[1:]))
            if len(due) > lag:
                yield due.pop(0)
    yield from due


def place(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    orders: Iterable[Iterable[RawUnit]],
    placement: str = "loop",
) -> Table:
    """Build a free-running table: each unit in the first tick that order and dependencies allow.

    Args:
      orders: the order of units on each stage.

    Raises:
      ScheduleError: the orders contradict each other; or a unit is missing, does not exist, is
        doubled, or is on a stage without its chunk.
    """
    queues = [list(order) for order in orders]
    units = {unit for queue in queues for unit in queue}
    last = num_repeats * num_stages - 1
    stage_of = stages_of_chunks(num_stages, num_repeats, placement).tolist()
    _check_units(name, num_microbatches, queues, stage_of)
    done: dict[RawUnit, int] = {}
    position = [0] * num_stages  # in each stage's order
    free = [0] * num_stages  # the next tick of each stage
    waiting: dict[RawUnit, int] = {}  # unit that has not run -> stage that waits for it
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        while position[stage] < len(queues[stage]):
            unit = queues[stage][position[stage]]
            needs = dependency(unit, last, units)
            tick = free[stage]
            if needs is not None:
                if needs not in done:
                    waiting[needs] = stage
                    break
                tick = max(tick, done[needs] + 1)
            done[unit] = tick
            free[stage] = tick + 1
            position[stage] += 1
            if unit in waiting:
                ready.append(waiting.pop(unit))
    if waiting:
        pairs = [f"{Unit(*queues[s][position[s]])} for {Unit(*u)}" for u, s in waiting.items()]
        raise ScheduleError(
            f"pipeline.schedule={name}: units wait for ever: {', '.join(pairs)}; reorder them, or "
            f"add what is missing"
        )
    ticks: dict[str, np.ndarray] = {}
    for (kind, microbatch, chunk), tick in done.items():
        if kind not in ticks:
            ticks[kind] = np.full((num_microbatches, last + 1), -1)
        ticks[kind][microbatch, chunk] = tick
    return from_ticks(name, num_stages, num_repeats, ticks, placement=placement)


def _check_units(
    name: str, num_microbatches: int, queues: list[list[RawUnit]], stage_of: list[int]
) -> None:
    seen: set[RawUnit] = set()
    for stage, queue in enumerate(queues):
        chunks = [chunk for chunk, owner in enumerate(stage_of) if owner == stage]
        for unit in queue:
            kind, microbatch, chunk = unit
            exists = kind in KINDS and 0 <= microbatch < num_microbatches and chunk in chunks
            if unit in seen:
                raise ScheduleError(
                    f"pipeline.schedule={name}: {Unit(*unit)} is twice on stage {stage}; drop one"
                )
            if not exists:
                raise ScheduleError(
                    f"pipeline.schedule={name}: {Unit(*unit)} is no unit of stage {stage}, which "
                    f"has chunks {', '.join(map(str, chunks))} and microbatches 0 to "
                    f"{num_microbatches - 1}"
                )
            seen.add(unit)


def stage_orders(table: Table) -> list[list[RawUnit]]:
    """Return the order of units on each stage of a table, by tick, then by slot."""
    rows: list[list[tuple[int, int, RawUnit]]] = [[] for _ in range(table.num_stages)]
    for slot, kind in enumerate(table.kinds):
        tick, stage, microbatch, chunk = table.units(kind)
        position = table.global_chunk(chunk, stage).tolist()
        units = zip(tick.tolist(), stage.tolist(), microbatch.tolist(), position, strict=True)
        for t, s, m, g in units:
            rows[s].append((t, slot, (kind, m, g)))
    return [[unit for *_, unit in sorted(row)] for row in rows]


def dependency(unit: RawUnit, last_chunk: int, units: Container[RawUnit]) -> RawUnit | None:
    """Return the unit whose result this one waits for, or None for the first chunk's F.

    All units of the table tell whether the next chunk's backward is a B or an I.
    """
    kind, microbatch, chunk = unit
    if kind == "F":
        return ("F", microbatch, chunk - 1) if chunk else None
    if kind == "W":
        return "I", microbatch, chunk
    if chunk == last_chunk:
        return "F", microbatch, chunk
    split = "I", microbatch, chunk + 1
    return split if split in units else ("B", microbatch, chunk + 1)


def group_microbatches(num_microbatches: int, smallest: int) -> np.ndarray:
    """Return the sizes of the groups in which microbatches pass the chunks, int [groups].

    There are as many groups of at least `smallest` microbatches as possible, of nearly equal sizes.
    With `smallest` microbatches the first one is back from the last stage when the first stage
    starts the group's next chunk, so no stage waits; and the largest group, which sets the memory,
    is as small as possible. Fewer microbatches than `smallest` make one group.

    >>> group_microbatches(11, smallest=4).tolist()
    [6, 5]
    """
    num_groups = max(num_microbatches // smallest, 1)
    size, larger = divmod(num_microbatches, num_groups)
    return np.where(np.arange(num_groups) < larger, size + 1, size)


def orders_1f1b(
    num_stages: int, num_microbatches: int, num_repeats: int, *, backward: str, lead: int
) -> list[Iterator[RawUnit]]:
    """Return each stage's forwards and backwards: some forwards, then both in turn.

    Several chunks run depth first in groups of microbatches.

    Args:
      backward: kind of the backwards, B or I.
      lead: how many forwards more than the stage after it a stage runs at first. The first gradient
        comes back after as many units as there are stages after this one; with 2 transfers there
        and back may take as long as a unit each.
    """
    sizes = group_microbatches(num_microbatches, num_stages)
    order = np.argsort(depth_first(sizes, sizes, num_repeats), axis=None)
    # (microbatch, chunk) in the order of forwards; backwards have the chunks reversed.
    walk = [divmod(int(unit), num_repeats) for unit in order]
    warmup = (num_repeats - 1) * int(sizes.max())
    return [
        one_forward_one_backward(
            [("F", m, c * num_stages + stage) for m, c in walk],
            [(backward, m, (num_repeats - 1 - c) * num_stages + stage) for m, c in walk],
            lead * (num_stages - 1 - stage) + warmup,
        )
        for stage in range(num_stages)
    ]


def depth_first(sizes: np.ndarray, strides: np.ndarray, num_repeats: int) -> np.ndarray:
    """Return the position of each unit in the order (group, chunk, microbatch), int [M, V].

    Args:
      sizes: microbatches per group, int [groups].
      strides: positions from a chunk of a group to its next chunk; positions beyond the group's
        size stay empty.
      num_repeats: V, chunks.

    With two groups of two microbatches and two chunks, microbatch 1 runs its chunk 0 second and its
    chunk 1 fourth:

    >>> depth_first(np.array([2, 2]), np.array([2, 2]), num_repeats=2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    # [M]: group of each microbatch.
    group = np.repeat(np.arange(len(sizes)), sizes)
    # [M]: which microbatch of its group.
    index = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
    base = (np.cumsum(strides) - strides) * num_repeats  # first position of each group
    # [M, 1] + [M, 1] * [V] -> [M, V]
    return (base[group] + index)[:, None] + strides[group][:, None] * np.arange(num_repeats)
