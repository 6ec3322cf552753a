"""Keep residuals in the host's memory between a forward and the backward of its chunk.

A rematerialisation policy may name tensors for the host's memory. The programs of units know
nothing about it: a forward returns these tensors on the device, and a backward takes them there.
Between the two the runner holds copies in the host's memory, which devices read and write while
they compute.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import jax
from jax.extend.core import JaxprEqn, Var

from maxpipe.devices.host_memory import DEVICE, HOST
from maxpipe.pipeline.engines.mpmd.program import SlicedProgram, UnitName
from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

# Units of a stage that are dispatched and may be unfinished when the next one's residuals are
# fetched: one computes while copies for the next are on their way.
UNITS_AHEAD = 2


def named_residuals(program: SlicedProgram, names: Collection[str]) -> frozenset[Var]:
    """Return the values that a forward writes under one of the names for its own backward alone.

    A value that another chunk reads as well stays on the device, from where it is sent.
    """
    readers: dict[Var, set[UnitName]] = {}
    for reader, computation in program.computations.items():
        for v in computation.reads:
            readers.setdefault(v, set()).add(reader)
    return frozenset(
        v
        for writer, computation in program.computations.items()
        if writer.kind == "F"
        for v in computation.writes
        if all(reader.kind != "F" and reader.chunk == writer.chunk for reader in readers[v])
        and any(name in names for name in _names_of(v, computation.equations))
    )


def _names_of(v: Var, equations: Sequence[JaxprEqn]) -> Iterator[str]:
    """Yield the name of a variable, even if a loop or a call computes it."""
    for eqn in equations:
        if v not in eqn.outvars:
            continue
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        elif eqn.primitive.name == "reduce_precision" and isinstance(eqn.invars[0], Var):
            # JAX rounds saved values to their own dtype, lest XLA keep them in a wider one.
            yield from _names_of(eqn.invars[0], equations)
        for body in map(open_jaxpr, inner_jaxprs(eqn)):
            # The condition of a loop and a kernel have other outputs than their equation.
            if len(body.outvars) == len(eqn.outvars):
                result = body.outvars[eqn.outvars.index(v)]
                if isinstance(result, Var):
                    yield from _names_of(result, body.eqns)


class Offloading:
    """Move one stage's residuals between its devices and the host, for a step.

    A copy starts as soon as it is dispatched, and takes device memory from then on. So units that
    move residuals are dispatched at most `UNITS_AHEAD` ahead of the devices; otherwise all
    residuals of a step could be fetched back at once.
    """

    def __init__(self, values: Collection[Var]):
        self._values = values
        self._leaving: list[jax.Array] = []
        self._unfinished: deque[list[jax.Array]] = deque()

    def away(self, values: Sequence[Var], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        stored = self._moved(values, arrays, HOST)
        self._leaving = [x for v, x in zip(values, stored, strict=True) if v in self._values]
        return stored

    def back(self, values: Sequence[Var], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return self._moved(values, arrays, DEVICE)

    def wait(self) -> None:
        """Wait until few enough units are unfinished to dispatch another."""
        if len(self._unfinished) == UNITS_AHEAD:
            jax.block_until_ready(self._unfinished.popleft())

    def dispatched(self, done: jax.Array) -> None:
        """Note a unit that was dispatched, given an array that is ready when it is finished."""
        self._unfinished.append([done, *self._leaving])
        self._leaving = []

    def _moved(
        self, values: Sequence[Var], arrays: Sequence[jax.Array], memory_kind: str
    ) -> list[jax.Array]:
        return [
            jax.device_put(x, x.sharding.with_memory_kind(memory_kind)) if v in self._values else x
            for v, x in zip(values, arrays, strict=True)
        ]
