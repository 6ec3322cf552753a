"""Sizes of a program's arrays, and what it does: its loops and collectives."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

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
    """Count how often a device executes each collective of a compiled program's text, with the
    trip counts of loops.

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


def loop_bodies(program: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr]:
    """Yield the body of every scan, outer ones first."""
    for eqn in open_jaxpr(program).eqns:
        for inner in inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield open_jaxpr(inner)
            yield from loop_bodies(inner)


def shard_bytes(tree: Any) -> int:
    """Return the bytes of one device's part of an abstract tree with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
