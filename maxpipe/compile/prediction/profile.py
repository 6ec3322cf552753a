"""Arrange a timeline for readers: time by phase, scope and source line, and spans in lanes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.timeline import OUTSIDE, Event, Spent, Timeline

COMPUTATION = "computation"
WAIT = "wait"
CONDITIONAL = "conditional"
LOOP = "loop"
UNNAMED = "(no name)"


class Row(NamedTuple):
    """A line of a table: its name, its seconds in a step, and these by part."""

    name: str
    seconds: float
    parts: dict[Part, float]


class Span(NamedTuple):
    """A rectangle of a timeline.

    Attributes:
      lane: `COMPUTATION`, `Part.COPIES`, or a collective with its axes, such as "all-gather fsdp".
      kind: a `Part`, `WAIT`, `CONDITIONAL` or `LOOP`.
      name: name of the operation.
      start, end: seconds since the timeline's start.
      source: line of code; "" if unknown.
      scope: part of the model; "" if unknown.
    """

    lane: str
    kind: str
    name: str
    start: float
    end: float
    source: str
    scope: str


def table(timeline: Timeline, name_of: Callable[[Spent], str], limit: int = 0) -> list[Row]:
    """Return the time of a step by some property of its operations, the largest first.

    Args:
      timeline: the timeline of a step.
      name_of: function that returns an operation's property; "" for none.
      limit: the most rows, 0 for all; the rest is summed up in one more row.
    """
    totals: dict[str, dict[Part, float]] = {}
    for spent in timeline.spent:
        parts = totals.setdefault(name_of(spent) or UNNAMED, dict.fromkeys(Part, 0.0))
        parts[spent.price.part] += spent.total
    rows = [Row(name, sum(parts.values()), parts) for name, parts in totals.items()]
    rows.sort(key=lambda row: -row.seconds)
    if not limit or len(rows) <= limit:
        return rows
    others = rows[limit:]
    parts = {part: sum(row.parts[part] for row in others) for part in Part}
    return [*rows[:limit], Row(f"{len(others)} others", sum(parts.values()), parts)]


def operation_name(spent: Spent) -> str:
    """Return an operation's name in the program, with its runs, its time and its place."""
    place = "" if spent.place.phase == OUTSIDE else f", {spent.place.phase}"
    return f"{spent.name} ({spent.place.runs:.0f} x {1e6 * spent.seconds:.3g} µs{place})"


def spans(
    timeline: Timeline, computation: str, start: float = 0.0, opens_loops: bool = True
) -> Iterator[Span]:
    """Yield what runs in a computation.

    A conditional that is not always taken is one span of its expected length.

    Args:
      timeline: the timeline of a step.
      computation: name of the computation.
      start: when it begins, in seconds.
      opens_loops: whether to yield what runs inside loops; else each loop is one span.
    """
    for event in timeline.events[computation]:
        if event.inside and (event.times == 1 or (event.times > 1 and opens_loops)):
            length = (event.end - event.start) / event.times
            for number in range(int(event.times)):
                begin = start + event.start + number * length
                yield from spans(timeline, event.inside, begin, opens_loops)
            continue
        yield from _spans_of(event, start)


def _spans_of(event: Event, start: float) -> Iterator[Span]:
    begin, end = start + event.start, start + event.end
    source, scope = event.origin.source, event.origin.scope
    if event.price is None:
        is_loop = event.times > 1
        times = (
            f"{event.times:.0f} iterations"
            if is_loop
            else f"in {100 * event.times:.0f} % of the iterations"
        )
        kind = LOOP if is_loop else CONDITIONAL
        yield Span(COMPUTATION, kind, f"{scope or event.name}, {times}", begin, end, source, scope)
        return
    part = event.price.part
    lane, kind = COMPUTATION, part.value
    if event.is_wait:
        kind = WAIT
    elif part in (Part.COPIES, Part.COLLECTIVES) and not event.price.is_estimated:
        lane = f"{event.price.collective} {event.price.axes}".strip() or part.value
    yield Span(lane, kind, event.name, begin, end, source, scope)


def merged(rectangles: Sequence[Span], shortest: float) -> list[Span]:
    """Join neighbours of one lane and kind that are shorter than `shortest` seconds."""
    result: list[Span] = []
    latest: dict[str, int] = {}  # lane -> index in the result
    for span in rectangles:
        index = latest.get(span.lane)
        if index is not None:
            before = result[index]
            is_short = span.end - span.start < shortest and before.end - before.start < shortest
            if is_short and before.kind == span.kind and span.start - before.end < shortest:
                result[index] = before._replace(end=max(before.end, span.end), name="short ones")
                continue
        latest[span.lane] = len(result)
        result.append(span)
    return result
