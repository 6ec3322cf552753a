"""Arrange a timeline for readers: time by phase, scope and source line, spans in lanes, a trace.

Perfetto and chrome://tracing open the trace.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.walk import OUTSIDE, Event, Spent, Timeline

COMPUTATION = "computation"
WAIT = "wait"
CONDITIONAL = "conditional"
LOOP = "loop"
UNNAMED = "(no name)"
MAX_SPANS = 500_000  # of a trace


class Row(NamedTuple):
    """A line of a table: its name, its seconds in a step, and these by part."""

    name: str
    seconds: float
    parts: dict[Part, float]


class Span(NamedTuple):
    """A rectangle of a timeline, in seconds since its start.

    Attributes:
      lane: `COMPUTATION`, `Part.COPIES`, or a collective with its axes, such as "all-gather fsdp".
      kind: a `Part`, `WAIT`, `CONDITIONAL` or `LOOP`.
      source, scope: line of code and part of the model; "" if unknown.
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

    Of more than `limit` rows, unless it is 0, the rest is summed up in one more row.
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
    """Yield what runs in a computation, which begins at `start`.

    A conditional that is not always taken is one span of its expected length; so is a loop unless
    `opens_loops`.
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


def trace_json(timeline: Timeline) -> bytes:
    """Return the whole step as JSON: a thread for each lane, times in microseconds.

    Spans of a lane that overlap, such as copies that run at once, have threads of their own:
    Perfetto drops a span that begins within another one and ends after it. A trace too long
    for Perfetto to open easily ends after `MAX_SPANS` operations; its process's name says so.
    """
    title = "predicted step of one device"
    shown = list(islice(spans(timeline, timeline.entry), MAX_SPANS + 1))
    if len(shown) > MAX_SPANS:
        title += f", only its first {MAX_SPANS} operations"
    threads = {COMPUTATION: 0}
    events: list[dict[str, object]] = []
    for name, span in _threaded(shown[:MAX_SPANS]):
        start, end = _nanoseconds(span.start), _nanoseconds(span.end)
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": _microseconds(start),
                "dur": _microseconds(end - start),
                "pid": 0,
                "tid": threads.setdefault(name, len(threads)),
                "args": {"source": span.source, "scope": span.scope},
            }
        )
    names: list[dict[str, object]] = [_metadata("process_name", 0, title)]
    names += [_metadata("thread_name", thread, name) for name, thread in threads.items()]
    document = {"traceEvents": names + events, "displayTimeUnit": "ms"}
    return json.dumps(document).encode()


def _threaded(shown: Iterable[Span]) -> Iterator[tuple[str, Span]]:
    """Yield each span with the first thread of its lane that is free: "copies", "copies 2"."""
    free_from: dict[str, int] = {}
    for span in sorted(shown, key=lambda span: span.start):
        names = (span.lane if n == 1 else f"{span.lane} {n}" for n in count(1))
        start = _nanoseconds(span.start)
        name = next(name for name in names if free_from.get(name, 0) <= start)
        free_from[name] = _nanoseconds(span.end)
        yield name, span


def _nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds, so that neighbours that share an instant do not overlap."""
    return round(1e9 * seconds)


def _microseconds(nanoseconds: int) -> float:
    """Return microseconds that become the same nanoseconds if a reader drops fractions."""
    value = nanoseconds / 1000
    return value if int(1000 * value) == nanoseconds else math.nextafter(value, math.inf)


def _metadata(kind: str, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
