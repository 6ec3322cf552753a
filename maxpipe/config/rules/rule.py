"""Declare rules across keys, run them, and compute the numbers that their messages propose.

A rule is a generator: it yields each key to change with what is wrong, and returns the values that
it derives. If it reads a key whose value is wrong or not known yet, it ends there. So all problems
can be shown at once, and a broken key silences only what depends on it.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Set
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

from maxpipe.config.errors import Problem
from maxpipe.config.options import update
from maxpipe.config.sections import Config

Updates: TypeAlias = dict[str, object]
Wrong: TypeAlias = Iterator[tuple[str, str]]  # keys, and what is wrong with each
Derived: TypeAlias = Generator[tuple[str, str], None, Updates]


@dataclass(frozen=True)
class Rule:
    """A check or derivation across keys, and the keys that it derives."""

    run: Callable[[Config], Wrong | Derived]
    writes: tuple[str, ...] = ()


def check(run: Callable[[Config], Wrong]) -> Rule:
    """Make a rule of a function that only checks; a decorator."""
    return Rule(run)


def derive(*keys: str) -> Callable[[Callable[[Config], Derived]], Rule]:
    """Make a rule of a function that derives some keys; a decorator."""
    return lambda run: Rule(run, keys)


def rules_in(names: dict[str, Any]) -> tuple[Rule, ...]:
    """Return the rules among the names of a module, in the order of the file."""
    return tuple(value for value in names.values() if isinstance(value, Rule))


def apply_rules(
    rules: Iterable[Rule], config: Config, broken: Iterable[str]
) -> tuple[Config, list[Problem]]:
    """Return the config with derived values, and all problems; rules are in order of dependence.

    The values of `broken` keys are wrong or not yet known.
    """
    unusable = set(broken)
    problems: list[Problem] = []
    for rule in rules:
        running, found = rule.run(_guarded(config, unusable)), list[Problem]()
        updates: Updates | None = None
        try:
            while True:
                found.append(Problem(*next(running)))
        except StopIteration as end:
            updates = end.value or {}
        except _UnusableKey:
            pass
        problems += found
        if found or updates is None:
            unusable.update(rule.writes, (problem.key for problem in found if problem.key))
        elif updates:
            config = update(config, updates)
    return config, problems


class _UnusableKey(Exception):
    """A rule has read a key without a usable value."""


def _guarded(section: Any, unusable: Set[str]) -> Any:
    """Return a copy of a section in which reading one of some keys raises `_UnusableKey`."""
    if not unusable or not is_dataclass(section):
        return section
    inside: dict[str, set[str]] = {}
    for key in unusable:
        name, _, rest = key.partition(".")
        inside.setdefault(name, set()).add(rest)
    forbidden = {name for name, rests in inside.items() if "" in rests}

    def read(self: object, name: str) -> object:
        if name in forbidden:
            raise _UnusableKey
        return object.__getattribute__(self, name)

    guarded: Any = object.__new__(type("Guarded", (type(section),), {"__getattribute__": read}))
    for name, value in vars(section).items():
        object.__setattr__(guarded, name, _guarded(value, inside.get(name, set())))
    return guarded


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
