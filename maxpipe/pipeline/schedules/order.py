"""Free-running tables from the order of work on each stage.

A unit is a tuple (kind, microbatch, global chunk); an order is the list of a stage's units.

Depth-first order over several chunks per stage: microbatches walk through the chunks in groups."""

from collections.abc import Container, Iterable, Iterator

import numpy as np

from maxpipe.pipeline.schedules.table import Table, from_ticks, stages_of_chunks

RawUnit = tuple[str, int, int]


def one_forward_one_backward(
    forwards: list[RawUnit], backwards: list[RawUnit], num_warmup: int
) -> Iterator[RawUnit]:
    """`num_warmup` forwards, then forward and backward in turn, then what is left."""
    yield from forwards[:num_warmup]
    rest = forwards[num_warmup:]
    for forward, backward in zip(rest, backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(rest) :]


def split_backward(
    stage: int, num_microbatches: int, num_warmup: int, lag: int
) -> Iterator[RawUnit]:
    """`num_warmup` forwards, then I and F in turn; W follows its I once more than `lag` W are due."""
    yield from (("F", m, stage) for m in range(min(num_warmup, num_microbatches)))
    for m in range(num_microbatches):
        yield "I", m, stage
        if m >= lag:
            yield "W", m - lag, stage
        if m + num_warmup < num_microbatches:
            yield "F", m + num_warmup, stage
    yield from (("W", m, stage) for m in range(max(num_microbatches - lag, 0), num_microbatches))


def place(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    orders: Iterable[Iterable[RawUnit]],
    placement: str = "loop",
) -> Table:
    """Runs every unit in the earliest tick that its stage's order and its dependencies allow.

    Args:
      orders: one per stage; together they must be free of deadlock.
    """
    queues = [list(order) for order in orders]
    units = {unit for queue in queues for unit in queue}
    last = num_repeats * num_stages - 1
    stage_of = stages_of_chunks(num_stages, num_repeats, placement).tolist()
    done: dict[RawUnit, int] = {}
    position, free = [0] * num_stages, [0] * num_stages
    waiting: dict[RawUnit, int] = {}
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
            assert stage_of[unit[2]] == stage
            done[unit] = tick
            free[stage] = tick + 1
            position[stage] += 1
            if unit in waiting:
                ready.append(waiting.pop(unit))
    assert all(p == len(q) for p, q in zip(position, queues, strict=True)), f"{name}: deadlock"
    ticks: dict[str, np.ndarray] = {}
    for (kind, microbatch, chunk), tick in done.items():
        if kind not in ticks:
            ticks[kind] = np.full((num_microbatches, last + 1), -1)
        ticks[kind][microbatch, chunk] = tick
    return from_ticks(name, num_stages, num_repeats, ticks, placement=placement)


def dependency(unit: RawUnit, last_chunk: int, units: Container[RawUnit]) -> RawUnit | None:
    """The unit whose result this one waits for, usually another stage's; None for the first F.

    Args:
      unit: kind, microbatch, global chunk.
      last_chunk: of the model.
      units: all of the table: the backward behind this one may be whole or split.
    """
    kind, microbatch, chunk = unit
    if kind == "F":
        return ("F", microbatch, chunk - 1) if chunk else None
    if kind == "W":
        return "I", microbatch, chunk
    if chunk == last_chunk:
        return "F", microbatch, chunk
    return next(
        u for u in (("B", microbatch, chunk + 1), ("I", microbatch, chunk + 1)) if u in units
    )


def group_microbatches(num_microbatches: int, smallest: int) -> np.ndarray:
    """Sizes of the groups, int [number of groups].

    As many groups as there can be with at least `smallest` microbatches each, as equal as possible:
    a microbatch then comes back to the first stage no earlier than it can, nobody waits, and the
    largest group, which sets the memory, is as small as possible. Fewer microbatches than
    `smallest` make one group.
    """
    num_groups = max(num_microbatches // smallest, 1)
    size, larger = divmod(num_microbatches, num_groups)
    return np.where(np.arange(num_groups) < larger, size + 1, size)


def depth_first(sizes: np.ndarray, strides: np.ndarray, num_repeats: int) -> np.ndarray:
    """Position of each unit in the order (group, chunk, microbatch of the group), int [M, V].

    Args:
      sizes: microbatches per group.
      strides: positions from a chunk of a group to its next chunk; positions beyond the size stay
        empty.
      num_repeats: V, chunks.
    """
    group = np.repeat(np.arange(len(sizes)), sizes)
    index = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
    base = (np.cumsum(strides) - strides) * num_repeats
    return (base[group] + index)[:, None] + strides[group][:, None] * np.arange(num_repeats)
