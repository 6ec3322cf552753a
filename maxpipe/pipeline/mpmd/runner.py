"""Running a sliced program over all microbatches in the order of a schedule's table.

One process drives all stages. It dispatches unit after unit and waits for none: devices work through what was
dispatched to them, and a transfer starts when what it moves is there. Memory follows the order of dispatch, since a
buffer that nothing dispatched so far needs any more is given back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.pipeline.mpmd.executable import Executable
from maxpipe.pipeline.mpmd.program import Name, SlicedProgram
from maxpipe.pipeline.mpmd.routes import route
from maxpipe.pipeline.schedules._table import KINDS, Table

Arrays = Mapping[Var, jax.Array]
Sums = list[dict[int, jax.Array]]
# Called with (stage, computation, microbatch) when a unit has been dispatched.
Observer = Callable[[int, Name, int], None]


class Runner:
    """Compiles nothing before the first run.

    Args:
      program: sliced into the kinds of units that the table has.
      table: the schedule.
      meshes: sub-mesh of each stage, all of the same shape.
      varying: inputs of the program that differ between microbatches.
      sum_shardings: for each stage, where the sums of the program's outputs lie that get parts there.

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
            name: stage_of[name.chunk + (1 if name.kind == "F" else -1)] for name, sent in routes.sends.items() if sent
        }
        self._sends = routes.sends
        self._num_uses = [{v: len(names) for v, names in uses.items()} for uses in routes.uses]
        self._used: dict[Name, list[Var]] = {name: [] for name in program.computations}
        for uses in routes.uses:
            for v, names in uses.items():
                for name in names:
                    self._used[name].append(v)
        self.needs: list[set[Var]] = [set() for _ in meshes]
        self.outputs: list[set[int]] = [set() for _ in meshes]
        self.executables: dict[Name, Executable] = {}
        for name, computation in program.computations.items():
            stage = stage_of[name.chunk]
            self.needs[stage].update(computation.arguments)
            self.outputs[stage].update(computation.outputs)
            dying = routes.last_reads(stage, name) - set(routes.sends[name])
            self.executables[name] = Executable(program, computation, dying, varying, sum_shardings[stage])
        self._moved: dict[Any, NamedSharding] = {}

    def run(
        self, fixed: Sequence[Arrays], varying: Sequence[Sequence[Arrays]], sums: Sums, observe: Observer | None = None
    ) -> Sums:
        """Dispatches all units of a step.

        Args:
          fixed: for each stage, inputs that all microbatches share.
          varying: for each stage and microbatch, the others.
          sums: for each stage, the start of the sum of each output that gets parts there; given away.
          observe: told of every unit.

        Returns:
          The sums over all microbatches, by stage.
        """
        shared = {name: [fixed[s][v] for v in self.executables[name].fixed] for s, name, m in self._order if not m}
        alive: list[dict[tuple[Var, int], jax.Array]] = [{} for _ in self._meshes]
        left: list[dict[tuple[Var, int], int]] = [{} for _ in self._meshes]
        for stage, name, m in self._order:
            program, here = self.executables[name], alive[stage]
            totals, mine = sums[stage], varying[stage][m]
            new, written = program.run(
                [totals[i] for i in program.outputs], [here[v, m] for v in program.donated],
                [here[v, m] for v in program.kept], shared[name], [mine[v] for v in program.varying],
            )  # fmt: skip
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


def execution_order(table: Table) -> list[tuple[int, Name, int]]:
    """(stage, computation, microbatch) of every unit, as dispatched: by tick, kind within a tick, stage.

    Where some backwards are whole and others split, a whole one is an I and a W.
    """
    is_split = "W" in table.kinds
    units: list[tuple[int, int, int, Name, int]] = []
    for kind in table.kinds:
        halves = ("I", "W") if kind == "B" and is_split else (kind,)
        tick, stage, microbatch, chunk = (a.tolist() for a in table.units(kind))
        chunk = table.global_chunk(chunk, stage).tolist()
        for t, s, m, c in zip(tick, stage, microbatch, chunk, strict=True):
            units.extend((t, KINDS.index(half), s, Name(half, c), m) for half in halves)
    return [(s, name, m) for _, _, s, name, m in sorted(units)]
