"""Declare rules across keys, run them, and compute the numbers that their messages propose.

A rule whose inputs are unusable is left out. So all problems can be shown at once, and a broken key
silences only the rules that depend on it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import update
from maxpipe.config.sections import Config

Updates: TypeAlias = dict[str, object]


@dataclass(frozen=True)
class Rule:
    """A check or derivation across keys.

    Attributes:
      run: function of the config that returns the values it derives, or raises ConfigError.
      reads: keys or whole sections that it depends on.
      writes: keys that it derives.
    """

    run: Callable[[Config], Updates | None]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def rule(
    *reads: str, writes: tuple[str, ...] = ()
) -> Callable[[Callable[[Config], Updates | None]], Rule]:
    """Declare which keys a function of the config reads and derives; a decorator."""
    return lambda run: Rule(run, reads, writes)


def apply_rules(
    rules: Iterable[Rule], config: Config, broken: Iterable[str]
) -> tuple[Config, list[Problem]]:
    """Run the rules whose inputs are sound.

    Args:
      rules: rules in order of dependence.
      config: the values so far.
      broken: keys whose values are wrong or not yet known.

    Returns:
      The config with derived values, and all problems.
    """
    unusable = set(broken)
    problems: list[Problem] = []
    for rule in rules:
        try:
            if any(_overlap(key, other) for key in rule.reads for other in unusable):
                unusable.update(rule.writes)
            elif updates := rule.run(config):
                config = update(config, updates)
        except ConfigError as error:
            problems.extend(error.problems)
            unusable.update(rule.writes, (problem.key for problem in error.problems if problem.key))
    return config, problems


def multiples_around(value: int, unit: int, least: int = 1) -> str:
    """Return the multiples of `unit` around `value`, at least `least`, such as "8 or 12"."""
    below = value // unit * unit
    smallest = -(-least // unit) * unit
    multiples = {max(below, smallest), max(below + unit, smallest)}
    return " or ".join(str(n) for n in sorted(multiples - {value}))


def divisors(value: int) -> list[int]:
    """Return all positive divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return [*small, *(value // n for n in reversed(small) if n * n != value)]


def distance(a: int, b: int) -> float:
    """Return how far apart two positive counts are; doubling is as far as halving."""
    return abs(math.log(a / b))


def _overlap(key: str, other: str) -> bool:
    """Return whether two keys or sections are the same, or one contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
