"""Covering arrays: few cases in which every pair of option values occurs."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]

_CANDIDATES = 40


def pairs_of(case: Case) -> set[tuple[str, Any, str, Any]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def all_cases(factors: Factors) -> Iterator[Case]:
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def legal_pairs(factors: Factors, is_legal: Callable[[Case], bool]) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that occur together in at least one legal case of the full product."""
    found = set()
    for a, b in combinations(factors, 2):
        for x, y in product(factors[a], factors[b]):
            fixed = dict(factors) | {a: (x,), b: (y,)}
            if any(is_legal(case) for case in all_cases(fixed)):
                found.add((a, x, b, y))
    return found


def covering_array(factors: Factors, is_legal: Callable[[Case], bool]) -> list[Case]:
    """Legal cases in which every legal pair occurs; greedy (AETG, Cohen et al. 1997), always the same."""
    rng = random.Random(0)
    missing = legal_pairs(factors, is_legal)
    cases = []
    while missing:
        candidates = []
        while len(candidates) < _CANDIDATES:
            case = _candidate(factors, sorted(missing, key=repr), rng)
            if is_legal(case):
                candidates.append(case)
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def _candidate(factors: Factors, missing: Sequence[tuple[str, Any, str, Any]], rng: random.Random) -> Case:
    """A case around one missing pair; each further value meets as many missing pairs as it can."""
    a, x, b, y = rng.choice(missing)
    case = {a: x, b: y}
    wanted = set(missing)
    for name in rng.sample(list(factors), len(factors)):
        if name in case:
            continue

        def gain(value: Any, name: str = name) -> int:
            met = [(other, case[other], name, value) for other in case if _before(factors, other, name)]
            met += [(name, value, other, case[other]) for other in case if _before(factors, name, other)]
            return sum(pair in wanted for pair in met)

        case[name] = max(rng.sample(list(factors[name]), len(factors[name])), key=gain)
    return {name: case[name] for name in factors}


def _before(factors: Factors, a: str, b: str) -> bool:
    names = list(factors)
    return names.index(a) < names.index(b)
