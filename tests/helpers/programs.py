"""Sizes of a program's arrays, and what it does: its loops and collectives."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from maxpipe.compile.hlo import executions, parse
from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


class Collective(NamedTuple):
    """The kind of a collective, and the shape and bytes of one of its results on one device."""

    kind: str
    shape: tuple[int, ...]
    bytes: int


def executed(text: str) -> Counter[Collective]:
    """Count how often a device executes each collective of a compiled program's text."""
    total: Counter[Collective] = Counter()
    for _, instruction, runs in executions(parse(text)):
        kind = instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            # An instruction with several results counts as several collectives.
            for dtype, sizes in _SHAPE.findall(instruction.type):
                shape = tuple(int(n) for n in sizes.split(",") if n)
                found = Collective(kind, shape, math.prod(shape) * _BYTES[dtype])
                total[found] += round(runs)
    return total


def loop_bodies(program: Jaxpr | ClosedJaxpr) -> Iterator[Jaxpr]:
    """Yield the body of every scan, outer ones first."""
    for eqn in open_jaxpr(program).eqns:
        for inner in inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield open_jaxpr(inner)
            yield from loop_bodies(inner)


def shard_bytes(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
