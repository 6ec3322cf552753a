"""Covering arrays: few cases in which every pair of option values occurs."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
Pair = tuple[str, Any, str, Any]

_CANDIDATES = 40
_TRIES = 200


def pairs_of(case: Case) -> set[Pair]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def all_cases(factors: Factors) -> Iterator[Case]:
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def sampled_product(
    factors: Factors, core: Sequence[str], is_legal: Callable[[Case], bool]
) -> Iterator[Case]:
    """Yield the full product of the factors in `core`; give the others random, fixed-seed values.

    Core combinations without any legal case are left out.
    """
    rng = random.Random(0)
    for fixed in all_cases({name: factors[name] for name in core}):
        for _ in range(_TRIES):
            case = {
                name: fixed[name] if name in fixed else rng.choice(factors[name])
                for name in factors
            }
            if is_legal(case):
                yield case
                break


def legal_pairs(
    factors: Factors, is_legal: Callable[[Case], bool], looks_at: Sequence[str] = ()
) -> set[Pair]:
    """Return the pairs of values that occur in at least one legal case of the full product.

    `looks_at` names the factors that `is_legal` depends on; () means all. The other factors are not
    varied.
    """
    legal = set()
    tried = {n: v if not looks_at or n in looks_at else v[:1] for n, v in factors.items()}
    for a, b in combinations(factors, 2):
        for x, y in product(factors[a], factors[b]):
            varied = tried | {a: (x,), b: (y,)}
            if any(is_legal(case) for case in all_cases(varied)):
                legal.add((a, x, b, y))
    return legal


def covering_array(
    factors: Factors, is_legal: Callable[[Case], bool], looks_at: Sequence[str] = ()
) -> list[Case]:
    """Return legal cases that cover every legal pair, by AETG (Cohen et al. 1997), seed fixed."""
    rng = random.Random(0)
    missing = legal_pairs(factors, is_legal, looks_at)
    cases = []
    while missing:
        candidates: list[Case] = []
        in_order = sorted(missing, key=repr)
        illegal = 0
        while len(candidates) < _CANDIDATES:
            # If the best values are illegal together, try random values.
            case = _candidate(factors, in_order, missing, rng, greedy=illegal < _CANDIDATES)
            if is_legal(case):
                candidates.append(case)
            illegal = 0 if is_legal(case) else illegal + 1
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def _candidate(
    factors: Factors,
    in_order: Sequence[Pair],
    missing: set[Pair],
    rng: random.Random,
    *,
    greedy: bool,
) -> Case:
    """Build a case around a missing pair; other values cover most missing pairs, or are random."""
    a, x, b, y = rng.choice(in_order)
    case = {a: x, b: y}
    names = list(factors)
    place = {name: i for i, name in enumerate(names)}
    for name in rng.sample(names, len(names)):
        if name in case:
            continue
        before = [(n, v) for n, v in case.items() if place[n] < place[name]]
        after = [(n, v) for n, v in case.items() if place[n] > place[name]]

        def gain(
            value: Any,
            name: str = name,
            before: Sequence[tuple[str, Any]] = before,
            after: Sequence[tuple[str, Any]] = after,
        ) -> int:
            pairs = [(other, chosen, name, value) for other, chosen in before]
            pairs += [(name, value, other, chosen) for other, chosen in after]
            return len(missing.intersection(pairs))

        values = rng.sample(list(factors[name]), len(factors[name]))
        case[name] = max(values, key=gain) if greedy else values[0]
    return {name: case[name] for name in names}
