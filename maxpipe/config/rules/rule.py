"""Rules that check or derive values across keys, run in order; a rule whose inputs are unusable is left out.

That is what lets all problems be shown at once: a broken key silences only what depends on it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import update
from maxpipe.config.sections import Config

Updates: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """`run(config)` returns the keys it derives, or raises ConfigError. `reads` may name whole sections."""

    run: Callable[[Config], Updates | None]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def rule(
    *reads: str, writes: tuple[str, ...] = ()
) -> Callable[[Callable[[Config], Updates | None]], Rule]:
    """Decorator that declares which keys a function of the config reads and derives."""
    return lambda run: Rule(run, reads, writes)


def apply_rules(
    rules: Iterable[Rule], config: Config, broken: Iterable[str]
) -> tuple[Config, list[Problem]]:
    """Run the rules whose inputs are sound.

    Args:
      rules: in order of dependence.
      config: the values so far.
      broken: keys whose values are wrong or not yet known.

    Returns:
      The config with derived values, and the problems found.
    """
    unusable = set(broken)
    problems: list[Problem] = []
    for rule in rules:
        try:
            if any(_overlap(key, other) for key in rule.reads for other in unusable):
                unusable.update(rule.writes)
            else:
                config = update(config, rule.run(config) or {})
        except ConfigError as error:
            problems.extend(error.problems)
            unusable.update(rule.writes, (problem.key for problem in error.problems if problem.key))
    return config, problems


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
