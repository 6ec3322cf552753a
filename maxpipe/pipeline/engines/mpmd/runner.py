"""Run a sliced program over all microbatches, unit by unit in the order of a schedule's table.

A process dispatches the units of its stages one after another and waits for none: each device works
through what was dispatched to it, and a transfer starts as soon as its source is computed. Memory
follows the order of dispatch, since a buffer is freed once no unit dispatched later reads it.

With several processes, each walks through the same order. A value that one of them sends to another
has a layout that both know without the other's programs, see `sent_spec`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from maxpipe.devices.transfers import absent, is_here, processes_of, send
from maxpipe.pipeline.engines.mpmd.offloading import Offloading
from maxpipe.pipeline.engines.mpmd.program import (
    Computation,
    SlicedProgram,
    UnitName,
    route,
    shape_of,
)
from maxpipe.pipeline.engines.mpmd.row_parallel import DeviceParts, UnitFunction
from maxpipe.pipeline.engines.mpmd.stage_clock import StageClock
from maxpipe.pipeline.schedules.table import KINDS, Table
from maxpipe.sharding.rules import split_counts

ArraysByVar = Mapping[Var, jax.Array]
Sums = list[dict[int, jax.Array]]  # for each stage: output of the program -> running sum
# Called with (stage, computation, microbatch) when a unit has been dispatched.
Observer = Callable[[int, UnitName, int], None]


def execution_order(table: Table) -> list[tuple[int, UnitName, int]]:
    """Return (stage, computation, microbatch) of each unit as dispatched: by tick, kind and stage.

    In a table with split backwards, a B that is not split is an I and a W.
    """
    # Kinds in the order of `KINDS`: in a lockstep table a B may follow the F of its own tick.
    is_split = "W" in table.kinds
    units: list[tuple[int, int, int, UnitName, int]] = []
    for kind in table.kinds:
        halves = ("I", "W") if kind == "B" and is_split else (kind,)
        tick, stage, microbatch, chunk = (a.tolist() for a in table.units(kind))
        chunk = table.global_chunk(chunk, stage).tolist()
        for t, s, m, c in zip(tick, stage, microbatch, chunk, strict=True):
            units.extend((t, KINDS.index(half), s, UnitName(half, c), m) for half in halves)
    return [(s, name, m) for _, _, s, name, m in sorted(units)]


def sent_spec(program: SlicedProgram, v: Var, parts: DeviceParts | None) -> PartitionSpec:
    """Return the layout of a value that goes to another process, which has not compiled its writer.

    It is the layout in the sharding constraint that writes or reads the value, such as the one on
    activations at the end of a chunk; without one, the value is whole on each device.

    With `parts` the program is one of devices' parts.
    """
    spec = PartitionSpec()
    for computation in program.computations.values():
        for eqn in computation.equations:
            # A gradient has no constraint of its own, but its reader lays it out like the value.
            is_constraint = eqn.primitive.name == "sharding_constraint"
            if is_constraint and (v in eqn.outvars or v in eqn.invars):
                spec = eqn.params["sharding"].spec
    return spec if parts is None else parts.stacked_spec(spec)


class Executable:
    """One computation, compiled at its first call and used for all microbatches.

    `run` is called as f(sums, donated, retained, fixed, varying): the running sums of `outputs`,
    the values of `donated` and `retained`, and the arguments of `fixed` and `varying`, each a list.
    It returns (new sums, values of `writes`, done). The arrays of the first two lists are donated;
    `done` is a scalar, ready when the unit is finished.

    Args:
      dying: values that no unit uses after this computation.
      offloaded: values that wait in the host's memory between units; units take copies of them.
      sent: layouts of values that go to another process.
      varying, sum_shardings, parts: as for `Runner`.

    Attributes:
      outputs: indices of the program's outputs to which the computation adds.
      donated, retained: the values read; XLA writes results into the memory of the former.
      fixed, varying: the arguments, those that all microbatches share and the others.
      moved: values that it takes from the host's memory or leaves there.
    """

    def __init__(
        self,
        program: SlicedProgram,
        computation: Computation,
        dying: Collection[Var],
        varying: Collection[Var],
        mesh: Mesh,
        sum_shardings: Mapping[int, NamedSharding],
        parts: DeviceParts | None = None,
        offloaded: Collection[Var] = frozenset(),
        sent: Mapping[Var, PartitionSpec] = MappingProxyType({}),
    ):
        self.outputs = list(computation.outputs)
        self.donated = _donations(computation, {*dying, *offloaded})
        self.retained = [v for v in computation.reads if v not in self.donated]
        self.fixed = [v for v in computation.arguments if v not in varying]
        self.varying = [v for v in computation.arguments if v in varying]
        self.writes = computation.writes
        self.moved = {*computation.reads, *self.writes}.intersection(offloaded)
        inputs = [*self.donated, *self.retained, *self.fixed, *self.varying]
        f = program.function(computation, inputs)
        Values = list[jax.Array]

        def run(
            sums: Values, donated: Values, retained: Values, fixed: Values, varying: Values
        ) -> tuple[Values, Values]:
            written, terms = f(*donated, *retained, *fixed, *varying)
            totals = zip(sums, self.outputs, strict=True)
            return [_add(total, terms[output]) for total, output in totals], written

        unit: UnitFunction = run
        if parts is not None:
            groups = self.donated, self.retained, self.writes
            unit = parts.unit(run, mesh, self.outputs, groups, (self.fixed, self.varying))

        def run_to_end(*args: Values) -> tuple[Values, Values, jax.Array]:
            totals, written = unit(*args)
            return totals, written, jnp.zeros(())

        run_to_end.__name__ = str(computation.name)  # in profiles and dumps of XLA
        # Sums keep their layout from unit to unit; XLA chooses the layouts of values that stay.
        values = [NamedSharding(mesh, sent[v]) if v in sent else None for v in self.writes]
        shardings = [sum_shardings[i] for i in self.outputs], values, None
        self.run: jax.stages.Wrapped = jax.jit(
            run_to_end, donate_argnums=(0, 1), out_shardings=shardings
        )


def _add(total: jax.Array, terms: Sequence[jax.Array]) -> jax.Array:
    for term in terms:
        total = total + jnp.asarray(term).astype(total.dtype)
    return total


def _donations(computation: Computation, dying: Collection[Var]) -> list[Var]:
    """Return the dying values whose memory XLA can reuse: a result has their shape and dtype."""
    free_results = [shape_of(v) for v in computation.writes]
    donated = []
    for v in computation.reads:
        if v in dying and shape_of(v) in free_results:
            free_results.remove(shape_of(v))
            donated.append(v)
    return donated


class LiveValues:
    """Hold the values on one stage that later units use.

    Args:
      num_uses: how many computations use each value there.
      offloading: moves those that are held in the host's memory.
    """

    def __init__(self, num_uses: Mapping[Var, int], offloading: Offloading):
        self._num_uses = num_uses
        self._offloading = offloading
        self.arrays: dict[tuple[Var, int], jax.Array] = {}
        self._uses_left: dict[tuple[Var, int], int] = {}

    def __len__(self) -> int:
        return len(self.arrays)

    def add(self, values: Sequence[Var], arrays: Sequence[jax.Array], microbatch: int) -> None:
        for v, x in zip(values, self._offloading.away(values, arrays), strict=True):
            self.arrays[v, microbatch] = x
            self._uses_left[v, microbatch] = self._num_uses[v]

    def read(self, values: Sequence[Var], microbatch: int) -> list[jax.Array]:
        return self._offloading.back(values, [self.arrays[v, microbatch] for v in values])

    def count_use(self, values: Sequence[Var], microbatch: int) -> None:
        for v in values:
            self._uses_left[v, microbatch] -= 1
            if not self._uses_left[v, microbatch]:
                del self.arrays[v, microbatch], self._uses_left[v, microbatch]


class Runner:
    """Dispatch the units of a step; each computation is compiled when it runs first.

    Args:
      program: the program, sliced into the kinds of units that the table has.
      meshes: sub-mesh of each stage; the axes have the same names, and sizes may differ.
      varying: inputs of the program that differ between microbatches.
      sum_shardings: for each stage, shardings of the running sums of the program's outputs.
      parts: how devices' parts make up arrays; None for a program of whole arrays.
      offloaded: values that wait for their readers in the host's memory, see `named_residuals`.
      processes: the processes of each stage; None for those that own its devices.

    Attributes:
      needs: for each stage, the inputs of the program that are read there.
      outputs: for each stage, the outputs of the program to which it adds.
      executables: the executable of each computation.
      gathers: by chunk, the inputs that are gathered before its first unit, and the program.
      reductions: by chunk, the outputs that are reduced after its last unit, and the program.
    """

    def __init__(
        self,
        program: SlicedProgram,
        table: Table,
        meshes: Sequence[Mesh],
        varying: Sequence[Var],
        sum_shardings: Sequence[Mapping[int, NamedSharding]],
        parts: DeviceParts | None = None,
        offloaded: Collection[Var] = frozenset(),
        processes: Sequence[frozenset[int]] | None = None,
    ):
        stage_of_chunk = table.stage_of_chunk.tolist()
        self._meshes = meshes
        self._is_here = list(map(is_here, meshes))
        self._order = execution_order(table)
        # 1. What each computation sends, and how often each value is used on each stage.
        routes = route(program, stage_of_chunk)
        self._sends = routes.sends
        self._receiver = {
            name: stage_of_chunk[name.chunk + (1 if name.kind == "F" else -1)]
            for name, values in routes.sends.items()
            if values
        }
        # The receiver of these has not compiled the program that writes them.
        self._members = members = list(processes or map(processes_of, meshes))
        sent = {
            v: sent_spec(program, v, parts)
            for name, receiver in self._receiver.items()
            if members[stage_of_chunk[name.chunk]] != members[receiver]
            for v in routes.sends[name]
        }
        self._sent: dict[tuple[Var, int], jax.ShapeDtypeStruct] = {}
        for v, spec in sent.items():
            x = shape_of(v) if parts is None else parts.stacked(shape_of(v))
            for stage, mesh in enumerate(meshes):
                self._sent[v, stage] = x.update(sharding=NamedSharding(mesh, spec))
        self._offloaded = offloaded
        self._num_uses = [{v: len(names) for v, names in uses.items()} for uses in routes.uses]
        self._used_by = {
            name: [v for uses in routes.uses for v, names in uses.items() if name in names]
            for name in program.computations
        }
        # 2. The computations of each stage. Values that die in one may lend their memory to its
        # results, unless they are still to be sent.
        self.needs: list[set[Var]] = [set() for _ in meshes]
        self.outputs: list[set[int]] = [set() for _ in meshes]
        self.executables: dict[UnitName, Executable] = {}
        for name, computation in program.computations.items():
            stage = stage_of_chunk[name.chunk]
            self.needs[stage].update(computation.arguments)
            self.outputs[stage].update(computation.outputs)
            dying = routes.last_reads(stage, name) - set(routes.sends[name])
            to_stage = meshes[stage], sum_shardings[stage], parts, offloaded, sent
            self.executables[name] = Executable(program, computation, dying, varying, *to_stage)
        # 3. What comes before the first unit of each chunk and after its last.
        self._last_unit = {name.chunk: (name, m) for _, name, m in self._order}
        self.gathers: dict[int, tuple[list[Var], jax.stages.Wrapped]] = {}
        self.reductions: dict[int, tuple[list[int], jax.stages.Wrapped]] = {}
        if parts is not None:
            self._add_ends(parts, stage_of_chunk)
        self._incoming = {
            name: self._from_other_stage(name, stage_of_chunk) for name in self._sends
        }
        self._sharding_on_stage: dict[tuple[int, tuple[int, ...], Sharding], NamedSharding] = {}

    def _from_other_stage(self, name: UnitName, stage_of_chunk: Sequence[int]) -> list[Var]:
        """Return the values that a computation reads and that another stage has sent for it."""
        sender = UnitName(name.kind, name.chunk - 1 if name.kind == "F" else name.chunk + 1)
        stage = stage_of_chunk[name.chunk]
        if self._receiver.get(sender) != stage or stage_of_chunk[sender.chunk] == stage:
            return []
        executable = self.executables[name]
        reads = {*executable.donated, *executable.retained}
        return [v for v in self._sends[sender] if v in reads]

    def run(
        self,
        fixed: Sequence[ArraysByVar],
        varying: Sequence[Sequence[ArraysByVar]],
        sums: Sums,
        observe: Observer | None = None,
        clocks: Mapping[int, StageClock] = MappingProxyType({}),
    ) -> Sums:
        """Dispatch all units of a step.

        Args:
          fixed: for each stage, the inputs that all microbatches share.
          varying: for each stage and microbatch, the other inputs.
          sums: for each stage, the start of each output's sum; donated. Those of other processes
            stay as they are.
          clocks: the clocks of this process's stages that are to be timed.
        """
        fixed_of: dict[int, ArraysByVar] = {}  # for each chunk at work
        offloading = [Offloading(self._offloaded) for _ in self._meshes]
        live = list(map(LiveValues, self._num_uses, offloading))
        for stage, name, microbatch in self._order:
            # All processes walk through the whole order, so their transfers come in the same order.
            if not self._is_here[stage]:
                self._receive(stage, name, microbatch, live)
                continue
            executable = self.executables[name]
            if name.chunk not in fixed_of:
                fixed_of[name.chunk] = self._gathered(name.chunk, fixed[stage])
            # 1. Compute.
            if executable.moved:
                offloading[stage].wait()
            clock, incoming = clocks.get(stage), self._incoming[name]
            if clock and incoming:
                clock.will_read(live[stage].read(incoming, microbatch))
            totals, written, done = executable.run(
                [sums[stage][output] for output in executable.outputs],
                live[stage].read(executable.donated, microbatch),
                live[stage].read(executable.retained, microbatch),
                [fixed_of[name.chunk][v] for v in executable.fixed],
                [varying[stage][microbatch][v] for v in executable.varying],
            )
            sums[stage].update(zip(executable.outputs, totals, strict=True))
            live[stage].add(executable.writes, written, microbatch)
            if executable.moved:
                offloading[stage].dispatched(done)
            if clock:
                clock.dispatched(done)
            # 2. Send to the stage of the next computation.
            if values := self._sends[name]:
                receiver = self._receiver[name]
                arrays = live[stage].read(values, microbatch)
                # Between processes all others make the same call, in `_receive`.
                arrived = send(arrays, [self._on_stage(receiver, x) for x in arrays])
                if self._is_here[receiver]:
                    live[receiver].add(values, arrived, microbatch)
            # 3. Free what was used here for the last time.
            live[stage].count_use(self._used_by[name], microbatch)
            if (name, microbatch) == self._last_unit[name.chunk]:
                del fixed_of[name.chunk]
                self._reduce(name.chunk, sums[stage])
            if observe:
                observe(stage, name, microbatch)
        assert not any(live), "values are left over after the last unit"
        return sums

    def _receive(
        self, stage: int, name: UnitName, microbatch: int, live: Sequence[LiveValues]
    ) -> None:
        receiver = self._receiver.get(name)
        if receiver is None or self._members[stage] == self._members[receiver]:
            return
        values = self._sends[name]
        # Laid out as by the other process, which has the data.
        arrays = [absent(self._sent[v, stage]) for v in values]
        arrived = send(arrays, [self._on_stage(receiver, x) for x in arrays])
        if self._is_here[receiver]:
            live[receiver].add(values, arrived, microbatch)

    def _add_ends(self, parts: DeviceParts, stage_of_chunk: Sequence[int]) -> None:
        """Prepare the programs that gather inputs for each chunk, and reduce its outputs."""
        inputs: dict[int, set[Var]] = {chunk: set() for chunk in range(len(stage_of_chunk))}
        last_chunk: dict[tuple[int, int], int] = {}  # (stage, output) -> last chunk to add to it
        for stage, name, _ in self._order:
            executable = self.executables[name]
            inputs[name.chunk].update(v for v in executable.fixed if v in parts.gathers)
            last_chunk.update(((stage, output), name.chunk) for output in executable.outputs)
        for chunk, stage in enumerate(stage_of_chunk):
            mesh = self._meshes[stage]
            if gathered := [v for v in parts.gathers if v in inputs[chunk]]:
                self.gathers[chunk] = gathered, parts.gather(mesh, gathered, f"gather{chunk}")
            summed = [output for (_, output), last in last_chunk.items() if last == chunk]
            if reduced := [output for output in sorted(summed) if parts.totals[output].axes]:
                self.reductions[chunk] = reduced, parts.reduction(mesh, reduced, f"reduce{chunk}")

    def _gathered(self, chunk: int, fixed: ArraysByVar) -> ArraysByVar:
        if chunk not in self.gathers:
            return fixed
        inputs, gather = self.gathers[chunk]
        return {**fixed, **dict(zip(inputs, gather([fixed[v] for v in inputs]), strict=True))}

    def _reduce(self, chunk: int, sums: dict[int, jax.Array]) -> None:
        if chunk in self.reductions:
            outputs, reduce = self.reductions[chunk]
            reduced = reduce([sums.pop(output) for output in outputs])
            sums.update(zip(outputs, reduced, strict=True))

    def _on_stage(self, stage: int, x: jax.Array) -> NamedSharding:
        """Return an array's layout on another stage, without axes that do not divide it there."""
        # Every transfer of every microbatch needs one, so they are cached.
        key = stage, x.shape, x.sharding
        if key not in self._sharding_on_stage:
            spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
            mesh = self._meshes[stage]
            self._sharding_on_stage[key] = NamedSharding(mesh, fitted(spec, x.shape, mesh))
        return self._sharding_on_stage[key]


def fitted(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the spec without the axes that do not divide a dimension of `shape` on `mesh`."""
    counts = split_counts(spec, mesh, len(shape))
    fits = [length % count == 0 for count, length in zip(counts, shape, strict=False)]
    if all(fits):
        return spec
    return PartitionSpec(*(entry if fit else None for entry, fit in zip(spec, fits, strict=False)))
