"""Draw memory against time of a plan's candidates, and the front that nothing beats in both."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import Plan
from maxpipe.plan.search.candidate import Candidate
from maxpipe.render.chart import round_values
from maxpipe.render.columns import numbers

_SLOWEST = 2.5  # end of the axis, as a multiple of the chosen or the fastest one
_RIGHT = 110  # right margin of the plot, for a label that overlaps no points


class Point(NamedTuple):
    """A candidate in the picture of memory against time."""

    seconds: float
    memory: float
    text: str


def front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both time and memory, the fastest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, p.memory)):
        if not best or point.memory < best[-1].memory:
            best.append(point)
    return best


def scatter_svg(plan: Plan) -> str:
    """Return the picture of memory against time of all candidates that were ranked."""
    outcome = plan.outcome
    candidates = [*outcome.fitting, *outcome.misfits]
    if not candidates:
        return ""
    unit = None if plan.request.machine.is_timed else min(c.per_sequence for c in candidates)
    points = [_point(candidate, unit) for candidate in candidates]
    edge = front(points)
    # Points that are far slower, even on the front, would squeeze the others together.
    latest = max(1.3 * edge[-1].seconds, 1.5 * edge[0].seconds)
    chosen = plan.winner.candidate.per_sequence if plan.winner else edge[0].seconds
    latest = min(latest, _SLOWEST * chosen)
    points = [p for p in points if p.seconds <= latest]
    capacity = plan.request.machine.capacity
    most = max(max(p.memory for p in edge), capacity or 0.0) * 1.25
    if capacity:
        most = min(most, 3 * capacity)
    points = [p for p in points if p.memory <= most]
    if not points:  # even the smallest is far too large
        return ""
    first = min(p.seconds for p in points)
    width, height, margin = 700.0, 320.0, 56.0

    def place(point: Point) -> tuple[float, float]:
        across = (point.seconds - first) / max(latest - first, 1e-12)
        return margin + across * (width - margin), height - point.memory / most * height + 10

    marks = []
    for point in points:
        x, y = place(point)
        colour = "--comp" if point in edge else "--idle"
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var({colour})" '
            f'data-text="{escape(point.text)}"/>'
        )
    if plan.winner and (own := _point(plan.winner.candidate, unit)) in points:
        x, y = place(own)
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="var(--ink)" '
            f'stroke-width="2" data-text="{escape(own.text)}"/>'
            f'<text x="{x + 12:.1f}" y="{y - 8:.1f}">chosen</text>'
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(p)) for p in edge if p in points)
    marks.insert(0, f'<polyline points="{line}" fill="none" stroke="var(--comp)"/>')
    if limit := plan.request.limit:
        y = height - limit / most * height + 10
        marks.append(
            f'<line x1="{margin}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--bad)" '
            f'stroke-dasharray="4 3"/><text class="quiet" x="{width + 8}" y="{y + 4:.1f}">usable '
            f"{limit / GIB:.3g} GiB</text>"
        )
    axes = _axes((width, height, margin), most / GIB, latest / first)
    box = f"0 0 {width + _RIGHT} {height + 50}"
    return f'<svg class="plot" viewBox="{box}">{axes}{"".join(marks)}</svg>'


def _axes(frame: tuple[float, float, float], most: float, longest: float) -> str:
    width, height, margin = frame
    bottom = height + 10
    memory, times = round_values(most, 4), [1 + more for more in round_values(longest - 1, 5)]
    ticks = "".join(
        f'<text class="quiet" x="{margin - 8}" y="{bottom - value / most * height + 4:.1f}" '
        f'text-anchor="end">{text}</text>'
        for value, text in zip(memory, numbers(memory, 6), strict=True)
    )
    scale = (width - margin) / max(longest - 1, 1e-12)
    ticks += "".join(
        f'<text class="quiet" x="{margin + (value - 1) * scale:.1f}" y="{bottom + 16}" '
        f'text-anchor="middle">{text}</text>'
        for value, text in zip(times, numbers(times, 6), strict=True)
    )
    return (
        f'<line class="axis" x1="{margin}" x2="{width}" y1="{bottom}" y2="{bottom}"/>'
        f'<line class="axis" x1="{margin}" x2="{margin}" y1="10" y2="{bottom}"/>{ticks}'
        f'<text class="quiet" x="{width}" y="{bottom + 34}" text-anchor="end">time of a sequence, '
        "1 = the fastest, by closed forms</text>"
        f'<text class="quiet" x="0" y="{bottom + 34}">GiB a device</text>'
    )


def _point(candidate: Candidate, unit: float | None) -> Point:
    """Return a candidate's point; its text gives the time as a multiple of `unit` if set."""
    seconds = candidate.per_sequence
    time = f"{candidate.seconds.step:.3g} s" if unit is None else f"{seconds / unit:.3g} x fastest"
    text = (
        f"{candidate.mesh_text()}\n{candidate.schedule_text()} M={candidate.microbatches} "
        f"V={candidate.repeats} {candidate.policy} {candidate.gather}\n"
        f"{candidate.memory / GIB:.3g} GiB, {time}"
    )
    return Point(seconds, candidate.memory, text)
