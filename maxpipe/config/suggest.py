"""What an unknown key was probably meant to be."""

import difflib

from maxpipe.config.maxtext import KEYS
from maxpipe.config.schema import OPTIONS, SECTIONS

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

    A legal key that ends in the same word wins over any resemblance, those of the same section first.
    """
    names = list(SECTIONS if is_section else OPTIONS)
    section, _, last = key.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == last]
    if same:
        return sorted(same, key=lambda name: -_likeness(name.rpartition(".")[0], section))[:3]
    scores = {
        name: max(_likeness(name, key), 0.95 * _likeness(name.rpartition(".")[2], last)) for name in names
    }
    best = max(scores.values())
    return [name for name in names if scores[name] >= max(_CUTOFF, best - 1e-9)][:3]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
