"""Steps that check or derive values across keys, run in order; a step whose inputs are unusable is left out.

That is what lets all problems be shown at once: a broken key silences only what depends on it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.schema import update
from maxpipe.config.sections import Config

Updates: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """`run(config)` returns the keys it derives, or raises ConfigError. `reads` may name whole sections."""

    run: Callable[[Config], Updates | None]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def step(*reads: str, writes: tuple[str, ...] = ()) -> Callable[[Callable[[Config], Updates | None]], Step]:
    """Decorator that declares which keys a function of the config reads and derives."""
    return lambda run: Step(run, reads, writes)


def run_steps(steps: Iterable[Step], config: Config, broken: Iterable[str]) -> tuple[Config, list[Problem]]:
    """Runs the steps whose inputs are sound.

    Args:
      steps: in order of dependence.
      config: the values so far.
      broken: keys whose values are wrong or not yet known.

    Returns:
      The config with derived values, and the problems found.
    """
    unusable = set(broken)
    problems: list[Problem] = []
    for s in steps:
        try:
            if any(_overlap(key, other) for key in s.reads for other in unusable):
                unusable.update(s.writes)
            else:
                config = update(config, s.run(config) or {})
        except ConfigError as error:
            problems.extend(error.problems)
            unusable.update(s.writes, (problem.key for problem in error.problems if problem.key))
    return config, problems


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
