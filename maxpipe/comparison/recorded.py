"""Read what runs have recorded in their directories, live ones as well. Imports no JAX."""

import os
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import lookup
from maxpipe.config.options import OPTIONS, update
from maxpipe.config.printing import DERIVED
from maxpipe.config.rules.engines import idleness
from maxpipe.config.sections import Config, DataConfig
from maxpipe.config.values import is_finite
from maxpipe.telemetry.recorder import METRICS
from maxpipe.telemetry.writers import CHANGED, parse_row

CONFIG, HISTORY = "config.yml", "config_history"
DEPTH = 3  # how far below a directory its runs are looked for
# Columns of steps; all but the first are numbers or None.
COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second", "mfu")

Number = float | None
KeyChange = tuple[int, str, object, object]  # step, key, value before, value after
Settings = Mapping[str, object]


@dataclass(frozen=True)
class Recorded:
    """What a run has recorded so far.

    Attributes:
      settings: full key -> value of the latest start; empty if its configuration is lost.
      derived: keys that the user did not set; None if an earlier version wrote the configuration.
      steps: a column for each of `COLUMNS`, one row for each finished step.
      evaluations: step -> loss, for evaluations with a finite loss.
      bits_per_byte: the last evaluation's.
      changes: of every key changed midway.
      seconds: phase -> seconds of all starts.
    """

    name: str
    root: Path
    settings: Settings
    derived: frozenset[str] | None
    steps: Mapping[str, Sequence[Number]]
    evaluations: Mapping[int, float]
    bits_per_byte: Number
    changes: Sequence[KeyChange]
    seconds: Mapping[str, float]

    @property
    def step(self) -> int:
        return int(self.steps["step"][-1] or 0) if self.steps["step"] else 0

    @property
    def total_steps(self) -> int | None:
        return value if isinstance(value := self.settings.get("steps"), int) else None

    @property
    def loss(self) -> Number:
        return self.steps["loss"][-1] if self.steps["loss"] else None

    @property
    def last_is_finite(self) -> bool:
        return not self.steps["step"] or None not in (self.loss, self.steps["grad_norm"][-1])

    @property
    def eval_loss(self) -> Number:
        return [*self.evaluations.values()][-1] if self.evaluations else None

    @property
    def best_eval(self) -> tuple[int, float] | None:
        return min(self.evaluations.items(), key=lambda at: at[1], default=None)

    def tokens(self, step: int) -> int | None:
        """Return the tokens of the steps up to `step`; None if the configuration is lost."""
        rows, ramp = (
            self.settings.get(f"data.{key}") for key in ("global_batch_size", "batch_ramp")
        )
        length = self.settings.get("data.sequence_length")
        if not (isinstance(rows, int) and isinstance(length, int) and isinstance(ramp, list)):
            return None
        return DataConfig(global_batch_size=rows, batch_ramp=ramp).sequences(step) * length

    def is_idle(self, key: str) -> bool:
        """Return whether a key has no effect in this run, as those of a pipeline without one."""
        return idleness(update(Config(), self.settings), key) is not None

    def median(self, column: str) -> Number:
        values = [value for value in self.steps[column] if value is not None]
        return statistics.median(values) if values else None


def read_runs(words: Sequence[str]) -> list[Recorded]:
    """Read the runs named by words, each a run's directory or one with runs below it."""
    roots: dict[Path, Path] = {}  # resolved path of each run -> its path as it was found
    problems = []
    for word in words:
        path = Path(word)
        # Unlike Path's method, this raises nothing in a directory that may not be entered.
        if not os.path.isdir(path):
            problems.append(Problem("DIR", f"there is no directory {word}"))
        elif below := sorted(_runs_below(path, DEPTH), key=_natural):
            for root in below:
                roots.setdefault(root.resolve(), root)
        else:
            message = f"{word} holds no run: no directory in it has {METRICS}, {DEPTH} levels deep"
            problems.append(Problem("DIR", message))
    if problems:
        raise ConfigError(*problems)
    names = _names([*roots])
    return [read_run(name, root) for name, root in zip(names, roots.values(), strict=True)]


def last_step(file: Path) -> int:
    """Return the last step of a metrics file, 0 if it has none or does not exist."""
    return max((step for step, row in metrics_rows(file) if "loss" in row), default=0)


def differing_keys(runs: Sequence[Recorded]) -> list[str]:
    """Return the keys, but names and places, that differ between runs or were changed midway, and
    have an effect in any.
    """
    known = [run for run in runs if run.settings]
    midway = {change[1] for run in known for change in run.changes}
    return [
        key
        for key in OPTIONS
        if key not in ("run_name", "output_dir")
        # The engine says which of the others have an effect.
        and (key == "pipeline.engine" or not all(key in (run.derived or ()) for run in known))
        and (key in midway or len({str(run.settings.get(key)) for run in known}) > 1)
        and not all(run.is_idle(key) for run in known)
    ]


def changed_keys(run: Recorded) -> list[str]:
    """Return the keys that were set to other values than their defaults, or changed midway, and
    have an effect.
    """
    midway = {change[1] for change in run.changes}
    may_be_derived = {key for key, option in OPTIONS.items() if option.bounds.derived}
    derived = may_be_derived if run.derived is None else run.derived
    return [
        key
        for key, option in OPTIONS.items()
        if key in run.settings and key not in derived
        if (key in midway or run.settings[key] != option.default) and not run.is_idle(key)
    ]


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    inner: list[Path] = []
    try:
        # A run that has not finished a step yet has a configuration and its history.
        is_run = (path / CONFIG).is_file() and (path / HISTORY).is_dir()
        is_run |= (path / METRICS).is_file()
        if depth and not is_run:
            visible = (place for place in path.iterdir() if not place.name.startswith("."))
            inner = [place for place in visible if place.is_dir() and not place.is_symlink()]
    except OSError as error:  # another user's directory
        _warn(path, error)
        return
    if is_run:
        yield path
    for place in inner:
        yield from _runs_below(place, depth - 1)


def _warn(path: Path, error: OSError) -> None:
    print(f"warning: {path} is left out: {error.strerror}", file=sys.stderr)


def read_run(name: str, root: Path) -> Recorded:
    """Read the run of a directory."""
    columns: dict[str, list[Number]] = {column: [] for column in COLUMNS}
    evaluations: dict[int, float] = {}
    bits_per_byte: Number = None
    changes: list[KeyChange] = []
    seconds = defaultdict[str, float](float)
    for step, row in metrics_rows(root / METRICS):
        if "loss" in row:
            for column, values in columns.items():
                values.append(_number(row.get(column)))
        if (loss := _number(row.get("eval_loss"))) is not None:
            evaluations[step] = loss
            bits_per_byte = _number(row.get("eval_bits_per_byte"))
        if isinstance(key := row.get(CHANGED), str) and row.get("before") is not None:
            changes.append((step, key, row["before"], row.get("now")))
        for key, value in row.items() if "goodput" in row else ():
            if key.startswith("seconds_in_"):
                seconds[key.removeprefix("seconds_in_")] += _number(value) or 0.0
    settings, derived = _read_settings(root / CONFIG)
    return Recorded(
        name, root, settings, derived, columns, evaluations, bits_per_byte, changes, seconds
    )


def metrics_rows(file: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield step and contents of each row; a crash or a live run may leave half a line."""
    if not file.is_file():
        return
    try:
        with file.open("rb") as lines:
            yield from filter(None, map(parse_row, lines))
    except OSError as error:
        _warn(file, error)


def _read_settings(file: Path) -> tuple[Settings, frozenset[str] | None]:
    """Return the values of a `config.yml`, and the keys that it marks as derived."""
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        tree = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        tree = None
    if not isinstance(tree, Mapping):
        return {}, None
    derived, sections = set(), list[str]()
    for line in text.splitlines():  # as `to_yaml` writes them: two blanks for each section
        name = line.strip().partition(":")[0]
        depth = (len(line) - len(line.lstrip())) // 2
        sections[depth:] = [name]
        if line.endswith(DERIVED):
            derived.add(".".join(sections))
    values = {key: lookup(tree, key, option.default) for key, option in OPTIONS.items()}
    return values, frozenset(derived) if derived else None


def _number(value: object) -> Number:
    return float(value) if isinstance(value, int | float) and is_finite(value) else None


def _names(roots: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that distinguish each from all others, which differ."""
    depth = 1
    while True:
        names = [str(Path(*root.parts[-depth:])) for root in roots]
        if len({*names}) == len(roots):
            return names
        depth += 1


def _natural(path: Path) -> list[tuple[float, str]]:
    """Return a sort key by which run-2 comes before run-10, and 3e-4 before 1e-3."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", str(path))
    return [(float(part), "") if i % 2 else (0.0, part) for i, part in enumerate(parts)]
