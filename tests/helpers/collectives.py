"""Count the collectives that a compiled program executes: loop bodies times their trip counts."""

import math
import re
from collections import Counter
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLS = re.compile(
    r"(?:body|to_apply|calls|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COLLECTIVE = re.compile(
    r"= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


class Collective(NamedTuple):
    """The kind of a collective, and the shape and bytes of one of its results on one device."""

    kind: str
    shape: tuple[int, ...]
    bytes: int


def executed(hlo: str) -> Counter[Collective]:
    """Count how often a device executes each collective of a compiled program's text.

    The program must have no conditionals around collectives.

    Raises:
      ValueError: a loop around a collective has no known trip count.
    """
    bodies, entry = _computations(hlo)
    return _count(bodies, entry)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry = ""
    lines: list[str] = []
    for line in hlo.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            lines = bodies.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)
    assert entry
    return bodies, entry


def _count(bodies: dict[str, list[str]], name: str) -> Counter[Collective]:
    total: Counter[Collective] = Counter()
    for line in bodies[name]:
        instruction = _COLLECTIVE.search(line)
        if instruction:
            # An instruction with several results counts as several collectives.
            for dtype, sizes in _SHAPE.findall(instruction[1]):
                shape = tuple(int(n) for n in sizes.split(",") if n)
                total[Collective(instruction[2], shape, math.prod(shape) * _BYTES[dtype])] += 1
            continue
        for inner in (_count(bodies, called) for called in _CALLS.findall(line)):
            if not inner:
                continue
            times = 1
            if " while(" in line:
                known = _TRIP_COUNT.search(line)
                if not known:
                    raise ValueError(f"unknown trip count: {line.strip()[:200]}")
                times = int(known[1])
            for collective, count in inner.items():
                total[collective] += count * times
    return total
