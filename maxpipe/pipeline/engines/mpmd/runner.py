"""A computation compiled for its stage: gradients are added in place, and what dies here gives its memory back.

How values get from the stage that computes them to the stages that read them, and how long they
live there.

Transfers run along the pipeline only: a value that a later stage needs is handed on by those
between, together with the activation, so that it is there when the schedule lets the later stage
start.

Running a sliced program over all microbatches in the order of a schedule's table.

One process drives all stages. It dispatches unit after unit and waits for none: devices work
through what was dispatched to them, and a transfer starts when what it moves is there. Memory
follows the order of dispatch, since a buffer that nothing dispatched so far needs any more is given
back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.pipeline.engines.mpmd.program import Computation, SlicedProgram, UnitName, shape_of
from maxpipe.pipeline.schedules.table import KINDS, Table


class Executable:
    """One computation, compiled at its first call and used for all microbatches.

    Called as f(sums, donated, kept, fixed, varying): the running sums of `outputs`, then the values
    of `donated` and `kept`, then the arguments of `fixed` and `varying`, each a list; returns (new
    sums, values of `writes`). The arrays of the first two lists are given away.

    Args:
      program: that the computation belongs to.
      computation: to compile.
      dying: values that nothing reads after this computation.
      varying: inputs of the program that differ between microbatches.
      sum_shardings: where the running sum of each output lies.

    Attributes:
      outputs: indices of the program's outputs that get a part from here.
      donated, kept: the values read; memory of the former is used for what is written.
      fixed, varying: the arguments.
      writes: the values written.
    """

    def __init__(
        self,
        program: SlicedProgram,
        computation: Computation,
        dying: Collection[Var],
        varying: Collection[Var],
        sum_shardings: Mapping[int, NamedSharding],
    ):
        self.outputs = list(computation.outputs)
        self.donated = _donations(computation, dying)
        self.kept = [v for v in computation.reads if v not in self.donated]
        self.fixed = [v for v in computation.arguments if v not in varying]
        self.varying = [v for v in computation.arguments if v in varying]
        self.writes = computation.writes
        inputs = [*self.donated, *self.kept, *self.fixed, *self.varying]
        f = program.function(computation, inputs)

        def run(
            sums: list, donated: list, kept: list, fixed: list, varying: list
        ) -> tuple[list, list]:
            written, parts = f(*donated, *kept, *fixed, *varying)
            return [_add(s, parts[i]) for s, i in zip(sums, self.outputs, strict=True)], written

        run.__name__ = str(computation.name)  # in profiles and dumps of XLA
        shardings = [sum_shardings[i] for i in self.outputs], None
        self.run: jax.stages.Wrapped = jax.jit(run, donate_argnums=(0, 1), out_shardings=shardings)


def _add(total: jax.Array, parts: Sequence[Any]) -> jax.Array:
    for part in parts:
        total = total + jnp.asarray(part).astype(total.dtype)
    return total


def _donations(computation: Computation, dying: Collection[Var]) -> list[Var]:
    """Dying values as large as something written: XLA takes memory over from like to like."""
    room = [shape_of(v) for v in computation.writes]
    found = []
    for v in computation.reads:
        if v in dying and shape_of(v) in room:
            room.remove(shape_of(v))
            found.append(v)
    return found


@dataclass
class Routes:
    """Transfers and lifetimes, the same for every microbatch.

    Attributes:
      sends: for each computation, the values that its stage hands to the stage of the next one when
        it is done.
      uses: for each stage, the computations that read or send a value there.
    """

    sends: dict[UnitName, list[Var]]
    uses: list[dict[Var, set[UnitName]]]

    def last_reads(self, stage: int, name: UnitName) -> set[Var]:
        """Values on a stage that surely nothing needs after computation `name` has run."""
        return {
            v
            for v, names in self.uses[stage].items()
            if name in names and all(before(n, name) for n in names)
        }


def route(program: SlicedProgram, stage_of_chunk: Sequence[int]) -> Routes:
    """Finds the way of every value.

    Args:
      program: sliced.
      stage_of_chunk: the stage that holds each of the G chunks.
    """
    routes = Routes(
        {name: [] for name in program.computations}, [{} for _ in range(max(stage_of_chunk) + 1)]
    )
    back = "I" if any(name.kind == "I" for name in program.computations) else "B"
    there: set[tuple[Var, int]] = set()
    for name in program.computations:
        stage = stage_of_chunk[name.chunk]
        there.update((v, stage) for v in program.computations[name].writes)
        for v in program.computations[name].reads:
            for hop, following in _hops(program.producer[v], name, back):
                here, next_stage = stage_of_chunk[hop.chunk], stage_of_chunk[following.chunk]
                if (v, stage) not in there and (v, next_stage) not in there:
                    routes.sends[hop].append(v)
                    routes.uses[here].setdefault(v, set()).add(hop)
                    there.add((v, next_stage))
            routes.uses[stage].setdefault(v, set()).add(name)
    return routes


def before(first: UnitName, second: UnitName) -> bool:
    """Whether `first` is `second`, or runs before it in every schedule."""
    if first == second:
        return True
    if first.kind == "W":
        return False
    if first.kind == "F":
        return second.kind != "F" or first.chunk < second.chunk
    return second.kind != "F" and first.chunk >= second.chunk


def _hops(producer: UnitName, reader: UnitName, back: str) -> list[tuple[UnitName, UnitName]]:
    """The computations behind which a value moves to the next stage, with the one that follows there."""
    turn = max(producer.chunk, reader.chunk)
    if producer.kind == "F" and reader.chunk >= producer.chunk:
        return [(UnitName("F", c), UnitName("F", c + 1)) for c in range(producer.chunk, turn)]
    return [(UnitName(back, c), UnitName(back, c - 1)) for c in range(turn, reader.chunk, -1)]


Arrays = Mapping[Var, jax.Array]
Sums = list[dict[int, jax.Array]]
# Called with (stage, computation, microbatch) when a unit has been dispatched.
Observer = Callable[[int, UnitName, int], None]


class Runner:
    """Compiles nothing before the first run.

    Args:
      program: sliced into the kinds of units that the table has.
      table: the schedule.
      meshes: sub-mesh of each stage, all of the same shape.
      varying: inputs of the program that differ between microbatches.
      sum_shardings: for each stage, where the sums of the program's outputs lie that get parts
        there.

    Attributes:
      needs: for each stage, the inputs of the program that are read there.
      outputs: for each stage, the outputs of the program that get a part there.
    """

    def __init__(
        self,
        program: SlicedProgram,
        table: Table,
        meshes: Sequence[Mesh],
        varying: Sequence[Var],
        sum_shardings: Sequence[Mapping[int, NamedSharding]],
    ):
        stage_of = table.stage_of_chunk.tolist()
        self._meshes = meshes
        self._order = execution_order(table)
        routes = route(program, stage_of)
        self._next_stage = {
            name: stage_of[name.chunk + (1 if name.kind == "F" else -1)]
            for name, sent in routes.sends.items()
            if sent
        }
        self._sends = routes.sends
        self._num_uses = [{v: len(names) for v, names in uses.items()} for uses in routes.uses]
        self._used: dict[UnitName, list[Var]] = {name: [] for name in program.computations}
        for uses in routes.uses:
            for v, names in uses.items():
                for name in names:
                    self._used[name].append(v)
        self.needs: list[set[Var]] = [set() for _ in meshes]
        self.outputs: list[set[int]] = [set() for _ in meshes]
        self.executables: dict[UnitName, Executable] = {}
        for name, computation in program.computations.items():
            stage = stage_of[name.chunk]
            self.needs[stage].update(computation.arguments)
            self.outputs[stage].update(computation.outputs)
            dying = routes.last_reads(stage, name) - set(routes.sends[name])
            self.executables[name] = Executable(
                program, computation, dying, varying, sum_shardings[stage]
            )
        self._moved: dict[Any, NamedSharding] = {}

    def run(
        self,
        fixed: Sequence[Arrays],
        varying: Sequence[Sequence[Arrays]],
        sums: Sums,
        observe: Observer | None = None,
    ) -> Sums:
        """Dispatches all units of a step.

        Args:
          fixed: for each stage, inputs that all microbatches share.
          varying: for each stage and microbatch, the others.
          sums: for each stage, the start of the sum of each output that gets parts there; given
            away.
          observe: told of every unit.

        Returns:
          The sums over all microbatches, by stage.
        """
        shared = {
            name: [fixed[s][v] for v in self.executables[name].fixed]
            for s, name, m in self._order
            if not m
        }
        alive: list[dict[tuple[Var, int], jax.Array]] = [{} for _ in self._meshes]
        left: list[dict[tuple[Var, int], int]] = [{} for _ in self._meshes]
        for stage, name, m in self._order:
            program, here = self.executables[name], alive[stage]
            totals, mine = sums[stage], varying[stage][m]
            new, written = program.run(
                [totals[i] for i in program.outputs],
                [here[v, m] for v in program.donated],
                [here[v, m] for v in program.kept],
                shared[name],
                [mine[v] for v in program.varying],
            )
            totals.update(zip(program.outputs, new, strict=True))
            for v, x in zip(program.writes, written, strict=True):
                self._arrive(stage, v, m, x, alive, left)
            if sent := self._sends[name]:
                to = self._next_stage[name]
                arrays = [here[v, m] for v in sent]
                moved = jax.device_put(arrays, [self._on(to, x.sharding) for x in arrays])
                for v, x in zip(sent, moved, strict=True):
                    self._arrive(to, v, m, x, alive, left)
            for v in self._used[name]:
                left[stage][v, m] -= 1
                if not left[stage][v, m]:
                    del here[v, m], left[stage][v, m]
            if observe:
                observe(stage, name, m)
        assert not any(alive), "values are left over behind the last unit"
        return sums

    def _arrive(self, stage: int, v: Var, m: int, x: jax.Array, alive: Any, left: Any) -> None:
        alive[stage][v, m] = x
        left[stage][v, m] = self._num_uses[stage][v]

    def _on(self, stage: int, sharding: Any) -> NamedSharding:
        """The same layout on another stage."""
        key = stage, sharding
        if key not in self._moved:
            spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            self._moved[key] = NamedSharding(self._meshes[stage], spec)
        return self._moved[key]


def execution_order(table: Table) -> list[tuple[int, UnitName, int]]:
    """(stage, computation, microbatch) of every unit, as dispatched: by tick, kind within a tick, stage.

    Where some backwards are whole and others split, a whole one is an I and a W.
    """
    is_split = "W" in table.kinds
    units: list[tuple[int, int, int, UnitName, int]] = []
    for kind in table.kinds:
        halves = ("I", "W") if kind == "B" and is_split else (kind,)
        tick, stage, microbatch, chunk = (a.tolist() for a in table.units(kind))
        chunk = table.global_chunk(chunk, stage).tolist()
        for t, s, m, c in zip(tick, stage, microbatch, chunk, strict=True):
            units.extend((t, KINDS.index(half), s, UnitName(half, c), m) for half in halves)
    return [(s, name, m) for _, _, s, name, m in sorted(units)]
