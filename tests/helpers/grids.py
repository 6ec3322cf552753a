"""Grids of cases that compare pipelined engines with the sequential engine, and covering arrays.

A covering array has few cases, in which every pair of option values occurs.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest

from helpers.engines import tiny
from maxpipe.config import Config

Case = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
Pair = tuple[str, Any, str, Any]

ROWS = 96  # a multiple of each grid's microbatches x data x fsdp

# Factors of every engine. `config_of` also reads: microbatches (per stage), mesh (names of the axes
# with two devices), gather, remat, remat_of ("iterations", "layers", both or "") and outside.
COMMON: Factors = {
    "stages": (1, 2, 4),
    "repeats": (1, 2, 4),
    "layers": (1, 2),
    "packed": (True, False),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "block": ("llama", "balanced"),
    "delay": (False, True),
    "uneven": (False, True),
    "scan": (True, False),
    "tiled": (False, True),
}

_CANDIDATES = 40
_TRIES = 200


def chunk_sizes(case: Case) -> list[int]:
    """Return the layers of each chunk in model order; uneven chunks mix sizes one and two."""
    other = 3 - case["layers"]
    chunks = range(case["stages"] * case["repeats"])
    return [other if case["uneven"] and i % 3 == 1 else case["layers"] for i in chunks]


def config_of(case: Case, **values: Any) -> Config:
    chunks = chunk_sizes(case)
    number, _, place = case["outside"].partition(" ")
    common = {
        "pipeline.num_repeats": case["repeats"],
        "pipeline.layers_per_stage": chunks if case["uneven"] else [],
        "pipeline.num_microbatches": int(case["stages"] * case["microbatches"]),
        "pipeline.parallel_layers": sum(chunks),
        "pipeline.outside_layers": place or "after",
        "pipeline.delay_activation_forwarding": case["delay"],
        "pipeline.fsdp_gather": case["gather"],
        "pipeline.scan_layers_per_stage": case["scan"],
        "pipeline.remat_policy": case["remat"],
        "pipeline.remat_iterations": "iterations" in case["remat_of"],
        "pipeline.remat_layers": "layers" in case["remat_of"],
        "model.block": case["block"],
        "model.num_layers": sum(chunks) + int(number or 0),
        "model.tie_embeddings": case["tied"],
        "model.dropout": case["dropout"],
        # Tied with `tied` so that half of the cases have these parameters.
        "model.qk_norm": case["tied"],
        "model.attention_bias": case["tied"],
        "model.z_loss": 1e-2,
        "model.logit_soft_cap": 5.0,
        "model.logit_tiles": 3 if case["tiled"] else 1,
        "data.global_batch_size": ROWS,
        "mesh.ici.stage": case["stages"],
    }
    return tiny(**common | {f"mesh.ici.{axis}": 2 for axis in case["mesh"].split()} | values)


def name_of(case: Case) -> str:
    """Return a test id: sizes, options that are on, chosen variants."""
    words = ["S{stages}-V{repeats}-L{layers}-M{microbatches}S".format(**case)]
    for name, value in case.items():
        if isinstance(value, str):
            words += value.split()
        elif isinstance(value, bool | float) and value and name != "microbatches":
            words.append(name)
    return "-".join(words)


def named(cases: Iterable[Case]) -> Iterator[object]:
    for case in cases:
        yield pytest.param(case, id=name_of(case))


def every_nth(cases: Iterable[Case], n: int) -> Iterator[object]:
    """Yield the cases of a product as parameters, marked `product` but for every n-th.

    CI runs those without the mark; `n` is coprime to the numbers of options, so that they occur in
    turn.
    """
    for number, case in enumerate(cases):
        marks = [pytest.mark.product] if number % n else []
        yield pytest.param(case, marks=marks, id=name_of(case))


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

    def gain(name: str, value: Any) -> int:
        return sum(
            ((n, v, name, value) if place[n] < place[name] else (name, value, n, v)) in missing
            for n, v in case.items()
        )

    for name in rng.sample(names, len(names)):
        if name not in case:
            values = rng.sample(list(factors[name]), len(factors[name]))
            case[name] = max(values, key=partial(gain, name)) if greedy else values[0]
    return {name: case[name] for name in names}
