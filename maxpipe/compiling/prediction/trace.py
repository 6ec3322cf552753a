"""Write a predicted step as a trace that Perfetto and chrome://tracing open."""

import gzip
import json
from itertools import islice

from maxpipe.compiling.prediction.profile import COMPUTATION, spans
from maxpipe.compiling.prediction.timeline import Timeline

MAX_SPANS = 500_000


def trace_bytes(timeline: Timeline) -> bytes:
    """Return the whole step as gzipped JSON: a thread for each lane, times in microseconds.

    A longer trace than Perfetto opens easily ends after `MAX_SPANS` operations.
    """
    threads = {COMPUTATION: 0}
    events: list[dict[str, object]] = []
    for span in islice(spans(timeline, timeline.entry), MAX_SPANS):
        thread = threads.setdefault(span.lane, len(threads))
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
                "pid": 0,
                "tid": thread,
                "args": {"source": span.source, "scope": span.scope},
            }
        )
    names: list[dict[str, object]] = [_metadata("process_name", 0, "predicted step of one device")]
    names += [_metadata("thread_name", thread, lane) for lane, thread in threads.items()]
    document = {"traceEvents": names + events, "displayTimeUnit": "ms"}
    return gzip.compress(json.dumps(document).encode(), mtime=0)


def _metadata(kind: str, thread: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}
