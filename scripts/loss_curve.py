"""Draw the losses of one or more runs as an SVG picture.

    python scripts/loss_curve.py runs/base loss.svg
    python scripts/loss_curve.py runs/a runs/b/metrics.jsonl loss.svg
    python scripts/loss_curve.py runs/a runs/b loss.svg --smooth 20 --x tokens

Training loss is a line per run, named after the run's directory; evaluation loss is marked by dots.
With --eval-only, evaluation losses are the lines; with --nested, equal lines are seen inside each
other. Needs nothing but Python.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 34, 44
# On a dark page: text, ground and dots, grid.
DARK = (
    "@media(prefers-color-scheme:dark){.loss{fill:#cbd5e1}"
    ".loss rect,.loss circle{fill:#12161c}.loss .grid{stroke:#2b333d}}"
)
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#475569")

STEP, TOKENS = "step", "tokens"

Points = list[tuple[int, float]]
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Run:
    name: str
    train: Points
    evaluation: Points


def read_run(path: Path, unit: str = STEP) -> Run:
    """Read loss against step or tokens; null losses and a torn last line are left out.

    Args:
      path: a metrics.jsonl, or the directory of a run.
      unit: `STEP`, or `TOKENS` read since the first step.

    Raises:
      ValueError: there is no loss in the file.
    """
    if path.is_dir():
        path = path / "metrics.jsonl"
    train: Points = []
    evaluation: Points = []
    tokens = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "tokens_per_second" in row:
            tokens += round(row["tokens_per_second"] * row["step_seconds"])
        for key, points in (("loss", train), ("eval_loss", evaluation)):
            if row.get(key) is not None:
                points.append((tokens if unit == TOKENS else row["step"], row[key]))
    if not train:
        raise ValueError(f"{path} holds no training loss; is it the metrics.jsonl of a run?")
    return Run(path.resolve().parent.name, train, evaluation)


def without_training(run: Run) -> Run:
    """Return a run's evaluation losses alone; raise ValueError if there are none."""
    if not run.evaluation:
        raise ValueError(f"{run.name} has no evaluation loss: leave out --eval-only")
    return replace(run, train=[])


def smooth(points: Points, window: int) -> Points:
    """Return the mean of every point and those before it, `window` of them where there are."""
    losses = [loss for _, loss in points]
    windows = (losses[max(0, i + 1 - window) : i + 1] for i in range(len(losses)))
    return [(at, sum(some) / len(some)) for (at, _), some in zip(points, windows, strict=True)]


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return round numbers from low to high, at a distance of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / distance), math.floor(high / distance + 1e-9)
    return [index * distance for index in range(first, last + 1)]


def draw(runs: Sequence[Run], unit: str = STEP, nested: bool = False) -> str:
    """Return the picture as SVG text; `unit` is that of `read_run`.

    With `nested` each line is thinner than the one before: equal ones are seen inside each other.
    """
    steps = [step for run in runs for step, _ in run.train + run.evaluation]
    losses = [loss for run in runs for _, loss in run.train + run.evaluation]
    first, last = 0, max(steps)
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="loss" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"',
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif"',
        'font-size="12" fill="#334155">',
        f"<style>{DARK}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in ticks(low, high):
        grid = f"M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}"
        parts.append(f'<path class="grid" d="{grid}" stroke="#e2e8f0"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>'
        )
    for step in ticks(first, last):
        below = HEIGHT - BOTTOM + 18
        parts.append(f'<text x="{x(step):.1f}" y="{below}" text-anchor="middle">{step:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{unit}</text>')
    parts.append('<text x="8" y="18">loss (nats per token)</text>')
    for index, run in enumerate(runs):
        width = 1.5 + 5 * nested * (len(runs) - 1 - index)
        parts += _draw_run(run, COLOURS[index % len(COLOURS)], width, index, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_run(run: Run, colour: str, width: float, index: int, x: Scale, y: Scale) -> list[str]:
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in run.train or run.evaluation)
    stroke = f'stroke="{colour}" stroke-width="{width:g}" stroke-linejoin="round"'
    parts = [f'<polyline points="{line}" fill="none" {stroke}/>']
    for step, loss in run.evaluation:
        centre = f'cx="{x(step):.1f}" cy="{y(loss):.1f}"'
        parts.append(f'<circle {centre} r="4" fill="white" stroke="{colour}" stroke-width="2"/>')
    key = f"{run.name}: training" if run.train else f"{run.name}: evaluation"
    if run.train and run.evaluation:
        key += ", evaluation (dots)"
    height = TOP + 8 + 18 * index
    parts.append(
        f'<path d="M{WIDTH - RIGHT - 22} {height}h20" stroke="{colour}" stroke-width="3"/>'
    )
    parts.append(
        f'<text x="{WIDTH - RIGHT - 30}" y="{height + 4}" text-anchor="end">{escape(key)}</text>'
    )
    return parts


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1; got {word!r}")
    return int(word)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draw the losses of runs as an SVG picture.")
    parser.add_argument(
        "metrics", nargs="+", type=Path, help="directory of each run, or its metrics.jsonl"
    )
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument(
        "--smooth", type=_count, default=1, metavar="N", help="running mean of N training losses"
    )
    parser.add_argument("--eval-only", action="store_true", help="leave out training losses")
    parser.add_argument(
        "--nested", action="store_true", help="each line thinner than the one before"
    )
    parser.add_argument(
        "--x", choices=(STEP, TOKENS), default=STEP, help="what the curves run along"
    )
    options = parser.parse_args(arguments)
    try:
        runs = [read_run(path, options.x) for path in options.metrics]
        if options.eval_only:
            runs = [without_training(run) for run in runs]
        runs = [replace(run, train=smooth(run.train, options.smooth)) for run in runs]
        picture = draw(runs, options.x, options.nested)
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        options.picture.write_text(picture, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
