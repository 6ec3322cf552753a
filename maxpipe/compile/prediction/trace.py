"""Write a predicted step as a trace that Perfetto and chrome://tracing open."""

import json
import math
from collections.abc import Iterable, Iterator
from itertools import count, islice

from maxpipe.compile.prediction.profile import COMPUTATION, Span, spans
from maxpipe.compile.prediction.timeline import Timeline

MAX_SPANS = 500_000


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
