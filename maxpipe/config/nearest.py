"""What an unknown key was probably meant to be.

Legal numbers near an illegal one, for error messages."""

import difflib
import math

from maxpipe.config.maxtext import KEYS
from maxpipe.config.options import OPTIONS, SECTIONS

_CUTOFF = 0.6
_TYPO = 0.9  # nearer to a MaxText name than this, no key of ours is meant


def unknown_key(key: str, is_section: bool = False) -> str:
    """The message for a key that does not exist: its name here if it is MaxText's, else the nearest keys."""
    if key in KEYS:
        ours, differs = KEYS[key]
        if not ours:
            return f"MaxText's {key} has no counterpart: {differs}"
        return f"MaxText's {key} is called {ours} here" + (f" ({differs})" if differs else "")
    if theirs := difflib.get_close_matches(key, KEYS, n=1, cutoff=_TYPO):
        return f"unknown key; {unknown_key(theirs[0])}"
    found = nearest_keys(key, is_section)
    if found:
        return f"unknown key; did you mean {' or '.join(found)}?"
    return "unknown key; --print-config lists all of them"


def nearest_keys(key: str, is_section: bool = False) -> list[str]:
    """Up to three legal full keys, at any level, that are most like `key`; empty if none is like it.

    A legal key that ends in the same word wins over any resemblance, those of the same section
    first.
    """
    names = list(SECTIONS if is_section else OPTIONS)
    section, _, last = key.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return sorted(same, key=lambda name: -_likeness(name.rpartition(".")[0], section))[:3]
    scores = {
        name: max(_likeness(name, key), 0.95 * _likeness(name.rpartition(".")[2], last))
        for name in names
    }
    best = max(scores.values())
    return [name for name in names if scores[name] >= max(_CUTOFF, best - 1e-9)][:3]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def multiples_around(value: int, unit: int, least: int = 1) -> str:
    """`8 or 12`: the multiples of `unit` next below and above `value` that are at least `least`."""
    below = value // unit * unit
    smallest = -(-least // unit) * unit
    return " or ".join(
        str(n) for n in sorted({max(below, smallest), max(below + unit, smallest)} - {value})
    )


def divisors(value: int) -> list[int]:
    """All positive divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return [*small, *(value // n for n in reversed(small) if n * n != value)]


def distance(a: int, b: int) -> float:
    """How far apart two positive counts are; doubling is as far as halving."""
    return abs(math.log(a / b))
