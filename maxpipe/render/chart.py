"""Draw one schedule as SVG: a Gantt chart, and below it the chunks in flight on every stage."""

import colorsys
import json
import math
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from maxpipe.pipeline.schedules.table import Unit
from maxpipe.plan.simulate import ROUNDING, Simulation

LEFT, RIGHT, TOP = 64, 20, 52
ROW, GAP = 26, 4
CURVES = 120
MIN_WIDTH, MAX_WIDTH = 720, 12_000
MAX_NAMED_STAGES = 10

# Pages and single pictures share these; not all SVG viewers understand `light-dark`.
LIGHT = (
    "--ground:#ffffff;--ink:#1b2430;--muted:#66717f;--line:#dfe4ea;--idle:#f1f3f6;--head:#2b3440"
)
DARK = "--ground:#12161c;--ink:#e6eaf0;--muted:#93a0b0;--line:#2b333d;--idle:#1c222a;--head:#c9d2dd"
STYLE = """
.chart{font:11px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.chart text{fill:var(--ink)}
.chart .title{font-size:15px;font-weight:600}
.chart .muted{fill:var(--muted)}
.chart .n text{text-anchor:middle;dominant-baseline:central;font-size:10.5px;pointer-events:none}
.chart .idle{fill:var(--idle)}
.chart .head{fill:var(--head)}
.chart .grid{stroke:var(--line);fill:none}
.chart .curve{fill:none;stroke-width:1.8;stroke-linejoin:round}
.chart .mid{text-anchor:middle}
.chart .end{text-anchor:end}
"""

# Hue in degrees and saturation of each kind.
HUES = {"F": (212, 0.72), "B": (28, 0.88), "I": (338, 0.65), "W": (162, 0.60)}
DARKEST, LIGHTEST = 0.46, 0.76
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Rgb(NamedTuple):
    red: int
    green: int
    blue: int

    @property
    def hex(self) -> str:
        return f"#{self.red:02x}{self.green:02x}{self.blue:02x}"


STAGES = (Rgb(116, 86, 214), Rgb(47, 134, 208), Rgb(34, 160, 140), Rgb(211, 152, 40))


def unit_colour(kind: str, chunk: int, num_repeats: int) -> Rgb:
    """Return the fill colour of a unit; later chunks are lighter."""
    hue, saturation = HUES[kind]
    step = chunk / (num_repeats - 1) if num_repeats > 1 else 0.15
    lightness = DARKEST + (LIGHTEST - DARKEST) * step
    return Rgb(*(round(255 * c) for c in colorsys.hls_to_rgb(hue / 360, lightness, saturation)))


def stage_colour(stage: int, num_stages: int) -> Rgb:
    """Return the line colour of a stage, violet to amber; legible on dark and light ground."""
    position = (len(STAGES) - 1) * (stage / (num_stages - 1) if num_stages > 1 else 0.0)
    below = min(int(position), len(STAGES) - 2)
    pairs = zip(STAGES[below], STAGES[below + 1], strict=True)
    return Rgb(*(round(a + (b - a) * (position - below)) for a, b in pairs))


def ink(fill: Rgb) -> Rgb:
    """Return white or near black, whichever can be read on a fill colour."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # WCAG's contrast with white; above 3.5 white looks better even where black scores higher.
    return Rgb(255, 255, 255) if 1.05 / (luminance + 0.05) >= 3.5 else Rgb(18, 22, 28)


@dataclass(frozen=True)
class Frame:
    """The geometry of a chart, in pixels."""

    scale: float  # pixels per unit of time
    horizon: float  # the time at the right edge
    num_stages: int

    @property
    def width(self) -> float:
        return LEFT + self.scale * self.horizon + RIGHT

    @property
    def rows_end(self) -> float:
        return TOP + self.num_stages * (ROW + GAP)

    @property
    def curves_top(self) -> float:
        return self.rows_end + 64

    @property
    def height(self) -> float:
        return self.curves_top + CURVES + 14

    def x(self, time: float) -> float:
        return LEFT + self.scale * time

    def y(self, stage: int) -> float:
        return TOP + stage * (ROW + GAP)


def fit_frame(runs: list[Simulation]) -> Frame:
    """Return a frame with one time scale for all runs, wide enough to number cells if possible."""
    horizon = max(run.makespan for run in runs) or 1.0
    lengths = [float(np.nanmin(run.end[k] - run.start[k])) for run in runs for k in run.table.kinds]
    shortest = min((length for length in lengths if length > 0), default=horizon)
    cell = _number_width(max(run.table.num_microbatches for run in runs) - 1)
    width = min(max(MIN_WIDTH, cell * horizon / shortest), MAX_WIDTH)
    return Frame(width / horizon, horizon, max(run.table.num_stages for run in runs))


def chart_svg(run: Simulation, frame: Frame | None = None, *, standalone: bool = True) -> str:
    """Draw a run as SVG, in a frame that other charts may share.

    A standalone chart is a file of its own, with styles, background and unit titles; for a page,
    its script reads `data-unit` (stage, start, end as `data-at`) and `data-curves`.
    """
    frame = frame or fit_frame([run])
    table = run.table
    title = (
        f"{table.name}, {table.num_stages} stages, {table.num_microbatches} microbatches, "
        f"{table.num_repeats} {'repeats' if table.num_repeats > 1 else 'repeat'}"
    )
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {_n(frame.width)} {_n(frame.height)}" '
        f'width="{_n(frame.width)}" height="{_n(frame.height)}" '
        f'data-stages="{table.num_stages}" data-left="{LEFT}" data-scale="{frame.scale:.6g}">'
    ]
    if standalone:
        parts.append(
            f"<style>.chart{{{LIGHT}}}@media(prefers-color-scheme:dark)"
            f"{{.chart{{{DARK}}}}}{STYLE}</style>"
            f'<rect width="100%" height="100%" fill="var(--ground)"/>'
        )
    parts += [*_heading(run), *_rows(run, frame), *_units(run, frame, standalone)]
    parts += [*_head(run, frame, standalone), *_curves(run, frame), "</svg>"]
    return "\n".join(parts)


def _heading(run: Simulation) -> list[str]:
    table = run.table
    facts = (
        f"bubble {run.bubble_fraction:.1%} · makespan {run.makespan:g} · peak in flight "
        f"{int(run.peak_in_flight.max())} {'chunks' if table.num_repeats > 1 else 'microbatches'}"
    )
    parts = [_text(LEFT, 18, escape(table.name), "title"), _text(LEFT, 36, facts, "muted")]
    x = legend = LEFT + 26 + max(9.4 * len(table.name), 6 * len(facts))
    for kind in table.kinds:
        for chunk in range(table.num_repeats):
            fill = unit_colour(kind, chunk, table.num_repeats).hex
            parts.append(f'<rect {_at(x, 8, 12, 12)} rx="2.5" fill="{fill}"/>')
            x += 13
        parts.append(_text(x + 4, 18, NAMES[kind]))
        x += 6.2 * len(NAMES[kind]) + 18
    if (run.head_end > run.head_start).any():
        parts += [f'<rect class="head" {_at(x, 8, 12, 12)} rx="2.5"/>', _text(x + 17, 18, "head")]
    if table.num_repeats > 1:
        shades = f"chunks 0 to {table.num_repeats - 1} from dark to light"
        parts.append(_text(legend, 36, shades, "muted"))
    return parts


def _rows(run: Simulation, frame: Frame) -> list[str]:
    below, length = frame.rows_end + 14, frame.scale * run.makespan
    parts = [_text(LEFT - 10, below, "time", "end muted")]
    for stage in range(run.table.num_stages):
        y = frame.y(stage)
        parts.append(_text(LEFT - 10, y + ROW / 2 + 4, f"stage {stage}", "end"))
        parts.append(f'<rect class="idle" {_at(LEFT, y, length, ROW)} rx="3"/>')
    for time in round_values(frame.horizon, frame.scale * frame.horizon / 60):
        parts.append(_text(frame.x(time), below, f"{time:g}", "mid muted"))
    return parts


def _units(run: Simulation, frame: Frame, titles: bool) -> list[str]:
    """Draw boxes and numbers, a group for every kind and chunk, so that each is styled once."""
    table, parts = run.table, []
    overlapping = _overlapping(run)
    height = ROW / 2 if overlapping else float(ROW)
    for kind in table.kinds:
        lane = height if overlapping and kind != "F" else 0.0
        for chunk in range(table.num_repeats):
            boxes, numbers = [], []
            fill = unit_colour(kind, chunk, table.num_repeats)
            for position in range(chunk * table.num_stages, (chunk + 1) * table.num_stages):
                stage = int(table.stage_of_chunk[position])
                times = zip(run.start[kind][:, position], run.end[kind][:, position], strict=True)
                for microbatch, (start, end) in enumerate(times):
                    if math.isnan(start):
                        continue
                    unit = Unit(kind, microbatch, position)
                    title = (
                        f"{unit}: {NAMES[kind]} of microbatch {microbatch}, "
                        f"chunk {chunk} of stage {stage}, {start:g} to {end:g}"
                    )
                    x, y, width = frame.x(start), frame.y(stage) + lane, frame.scale * (end - start)
                    # A hairline between neighbours, unless they are too narrow.
                    inset = 0.5 if width > 4 else 0.0
                    shape = _at(x + inset, y, max(width - 2 * inset, 0), height)
                    shape += ' rx="2.5"' * (inset > 0)
                    at = f"{stage} {start:g} {end:g}"
                    boxes.append(_box(shape, title if titles else "", str(unit), at))
                    if width >= _number_width(microbatch) - 1:
                        numbers.append(_text(x + width / 2, y + height / 2, f"{microbatch}"))
            parts.append(f'<g fill="{fill.hex}">{"".join(boxes)}</g>')
            parts.append(f'<g class="n" style="--ink:{ink(fill).hex}">{"".join(numbers)}</g>')
    return parts


def _box(shape: str, title: str, unit: str, at: str) -> str:
    if title:
        return f"<rect {shape}><title>{title}</title></rect>"
    return f'<rect data-unit="{unit}" data-at="{at}" {shape}/>'


def _overlapping(run: Simulation) -> bool:
    """Return whether F and B (or I) of a tick overlap, so that a stage needs two lanes."""
    table = run.table
    backward = "I" if "I" in table.kinds else "B"
    if not (table.lockstep and backward in table.kinds):
        return False
    both = (table.microbatch["F"] >= 0) & (table.microbatch[backward] >= 0)
    ends, starts = np.zeros(table.num_ticks), np.full(table.num_ticks, np.inf)
    ends[table.ticks["F"]], starts[table.ticks[backward]] = run.end["F"], run.start[backward]
    return bool((ends > starts + ROUNDING * run.makespan)[both.any(axis=1)].any())


def _head(run: Simulation, frame: Frame, titles: bool) -> list[str]:
    """Draw the loss: on every stage in lockstep, else on the stage of the last chunk."""
    table = run.table
    stages = range(table.num_stages) if table.lockstep else [int(table.stage_of_chunk[-1])]
    parts = []
    for microbatch, (start, end) in enumerate(zip(run.head_start, run.head_end, strict=True)):
        title = f"head of microbatch {microbatch}" if titles else ""
        for stage in stages if end > start else []:
            place = _at(frame.x(start), frame.y(stage), frame.scale * (end - start), ROW)
            at = f"{stage} {start:g} {end:g}"
            parts.append(_box(f'class="head" {place}', title, f"H{microbatch}", at))
    return parts


def _curves(run: Simulation, frame: Frame) -> list[str]:
    table, top = run.table, frame.curves_top
    peak = max(int(run.peak_in_flight.max()), 1)  # nothing is in flight if units take no time
    bottom = top + CURVES
    parts = [_text(LEFT, top - 16, "in flight", "muted")]
    for value in round_values(peak, min(peak, 4)):
        y = _n(bottom - CURVES * value / peak)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{_n(frame.x(frame.horizon))}"/>')
        parts.append(_text(LEFT - 10, float(y) + 4, f"{value:g}", "end muted"))
    steps, x = [], LEFT + 64.0
    number = min(table.num_stages, MAX_NAMED_STAGES)
    named = np.linspace(0, table.num_stages - 1, number).round().tolist()
    for stage in range(table.num_stages):
        times, counts = run.in_flight(stage)
        # Several changes at the same time are one step, to the last value.
        last = np.append(np.diff(times) > ROUNDING * run.makespan, True)
        times, counts = times[last].tolist(), counts[last].tolist()
        steps.append([[float(f"{t:g}") for t in times], counts])
        path = "".join(
            f"H{_n(frame.x(t))}V{_n(bottom - CURVES * c / peak)}"
            for t, c in zip(times, counts, strict=True)
        )
        colour = stage_colour(stage, table.num_stages).hex
        parts.append(f'<path class="curve" stroke="{colour}" d="M{LEFT} {_n(bottom)}{path}"/>')
        if stage in named:
            label = f"stage {stage}: {int(run.peak_in_flight[stage])}"
            parts.append(f'<rect {_at(x, top - 21, 12, 4)} rx="2" fill="{colour}"/>')
            parts.append(_text(x + 16, top - 16, label))
            x += 34 + 5.8 * len(label)
    place = _at(LEFT, top, frame.scale * frame.horizon, CURVES)
    curves = json.dumps(steps, separators=(",", ":"))
    parts.append(f'<rect class="hover" {place} fill="transparent" data-curves=\'{curves}\'/>')
    return parts


def _number_width(microbatch: int) -> int:
    return 7 * len(str(microbatch)) + 6


def round_values(limit: float, count: float) -> list[float]:
    rough = limit / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * i for i in range(math.floor(limit / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f'class="{kind}" ' if kind else ""
    return f'<text {style}x="{_n(x)}" y="{_n(y)}">{text}</text>'


def _at(x: float, y: float, width: float, height: float) -> str:
    return f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
