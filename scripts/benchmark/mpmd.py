"""Measure the MPMD engine's overhead per unit, and compare real runs with the simulator.

    python scripts/benchmark/mpmd.py
    python scripts/benchmark/mpmd.py --stages 2 --microbatches 16 --seconds 0.05
    python scripts/benchmark/mpmd.py --processes 2
    python scripts/benchmark/mpmd.py --processes 4 --seconds 0.1 --sleep
    python scripts/benchmark/mpmd.py --processes 2 --size 512 --schedules 1f1b --trace traces

All devices are simulated CPU devices, one per stage; with several processes each has an equal share
of them. A chunk's forward, input gradient and weight gradient are loops of equal length on one core
each, so the machine needs as many idle cores as there are stages; with `--sleep` they take a given
time without a core, so that any machine will do. The prediction is the simulator's
makespan with the time that such a unit took by itself. The overhead is the time of a step whose
units do next to nothing, by the number of units. Host time is what a process spends on dispatching
one of its units, transfers included; compilation is CPU time of the first step, of each process.
`--trace` writes when each unit ran and each transfer took place in a further step, for
https://ui.perfetto.dev, and prints for how long stages waited for transfers.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}
ROUNDS = 5
SIZE = 64  # of matrices, if not given
CALIBRATION = 200  # trips

Load = Callable[[Any], Any]  # of a matrix, which it returns


def busy(x: Any, trips: int) -> Any:
    """Return `x`, slowly: after a loop that XLA neither splits over cores nor removes."""
    import jax
    import jax.numpy as jnp

    return jax.lax.fori_loop(0, trips, lambda _, y: jnp.cos(y), x) * 1e-9 + x


def asleep(x: Any, seconds: float) -> Any:
    """Return `x` after some seconds in which a device has work, and no core."""
    import jax

    def wait(y: Any) -> Any:
        time.sleep(seconds)
        return y

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def busy_model(num_chunks: int, load: Load) -> Any:
    """Build the loss of a matrix product; a chunk's F, I and W are a product and a load each."""
    import jax
    import jax.numpy as jnp

    from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary

    @jax.custom_vjp
    def chunk(x: Any, w: Any) -> Any:
        return load(x @ w)

    def backward(residuals: Any, ct: Any) -> Any:
        x, w = residuals
        return load(ct @ w.T), load(x.T @ ct)

    chunk.defvjp(lambda x, w: (chunk(x, w), (x, w)), backward)

    def loss(w: Any, x: Any) -> Any:
        for c in range(num_chunks):
            x = mark_stage_boundary(chunk(x, w[c]))
        return jnp.sum(x)

    return loss


def seconds_of(load: Load, size: int) -> float:
    """Measure the time of one unit by itself."""
    import jax
    import jax.numpy as jnp

    unit = jax.jit(lambda x: load(x @ x))
    x = jnp.eye(size)
    unit(x).block_until_ready()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        unit(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)


class Timing(NamedTuple):
    """Seconds of one step in one process.

    Attributes:
      dispatched: until all units of this process are dispatched.
      finished: until they have run.
      units: host time of each.
    """

    dispatched: float
    finished: float
    units: list[float]


class Unit(NamedTuple):
    """When a unit ran; times are of the machine's clock, which all processes share.

    Attributes:
      kind, chunk, microbatch: which.
      stage: that ran it.
      begin, end: of its run.
      arrived: when what it reads of another stage was there, if it reads any.
    """

    kind: str
    chunk: int
    microbatch: int
    stage: int
    begin: float
    end: float
    arrived: float | None


class UnitTimes:
    """What the runner takes for the clock of a stage: the times of all units of a step."""

    def __init__(self) -> None:
        self._ends, self._arrivals = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._arrived: Future[float] | None = None
        self._dispatched: list[tuple[float, Future[float] | None, Future[float]]] = []

    def will_read(self, arrays: Sequence[Any]) -> None:
        from maxpipe.pipeline.engines.mpmd.stage_clock import ready_after

        self._arrived = self._arrivals.submit(ready_at, ready_after(arrays))

    def dispatched(self, done: Any) -> None:
        end = self._ends.submit(ready_at, done)
        self._dispatched.append((time.perf_counter(), self._arrived, end))
        self._arrived = None

    def times(self) -> Iterator[tuple[float, float, float | None]]:
        """Yield begin, end and arrival of each unit."""
        last = 0.0
        for dispatched, arrival, done in self._dispatched:
            arrived, end = arrival.result() if arrival else None, done.result()
            yield max(last, dispatched, arrived or 0.0), end, arrived
            last = end


def ready_at(array: Any) -> float:
    """Wait for an array; return the time."""
    array.block_until_ready()
    return time.perf_counter()


class Step:
    """One step of a schedule over a busy model, a device per stage."""

    def __init__(self, table: Any, load: Load, size: int):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from maxpipe.devices.transfers import is_here
        from maxpipe.pipeline.engines.mpmd.runner import Runner, execution_order
        from maxpipe.pipeline.engines.mpmd.slicing import slice_program

        loss = busy_model(table.num_chunks, load)
        identity = np.eye(size, dtype=np.float32)
        w, x = [jnp.eye(size)] * table.num_chunks, jnp.eye(size)
        program = slice_program(
            jax.make_jaxpr(jax.value_and_grad(loss))(w, x), split_backwards="W" in table.kinds
        )
        meshes = [Mesh(np.array([d]), ("stage",)) for d in jax.devices()[: table.num_stages]]
        replicated = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
        sums = [dict.fromkeys(range(program.num_outputs), sharding) for sharding in replicated]
        self._runner = Runner(program, table, meshes, [program.inputs[-1]], sums)
        self._size, self._replicated = size, replicated
        self._is_here = list(map(is_here, meshes))
        own = list(zip(replicated, self._is_here, strict=True))
        self._fixed = [
            {v: jax.device_put(identity, sharding) for v in program.inputs[:-1]} if here else {}
            for sharding, here in own
        ]
        self._micro = [
            [{program.inputs[-1]: jax.device_put(identity, sharding)}] * table.num_microbatches
            if here
            else []
            for sharding, here in own
        ]
        self.num_units = len(execution_order(table))

    def _zeros(self) -> list[dict[int, Any]]:
        """Return the start of all sums, when all processes have it."""
        import jax
        import numpy as np

        shape = self._size, self._size
        sums = [
            {
                i: jax.device_put(np.zeros(shape if i else (), np.float32), sharding)
                for i in (outputs if here else ())
            }
            for outputs, sharding, here in zip(
                self._runner.outputs, self._replicated, self._is_here, strict=True
            )
        ]
        jax.block_until_ready(sums)
        together("step")
        return sums

    def run(self) -> Timing:
        """Run a step."""
        import jax

        sums = self._zeros()
        units: list[float] = []
        begin = last = time.perf_counter()

        def observe(*_: object) -> None:
            nonlocal last
            now = time.perf_counter()
            units.append(now - last)
            last = now

        sums = self._runner.run(self._fixed, self._micro, sums, observe)
        dispatched = time.perf_counter() - begin
        jax.block_until_ready(sums)
        return Timing(dispatched, time.perf_counter() - begin, units)

    def units(self) -> list[Unit]:
        """Run a step; return the units of this process."""
        sums = self._zeros()
        clocks = {s: UnitTimes() for s, here in enumerate(self._is_here) if here}
        names: dict[int, list[tuple[str, int, int]]] = {stage: [] for stage in clocks}

        def observe(stage: int, name: Any, microbatch: int) -> None:
            names[stage].append((name.kind, name.chunk, microbatch))

        self._runner.run(self._fixed, self._micro, sums, observe, clocks)
        return [
            Unit(*name, stage, *times)
            for stage, clock in clocks.items()
            for name, times in zip(names[stage], clock.times(), strict=True)
        ]

    def best(self) -> tuple[Timing, float]:
        """Return the fastest of some steps, and the CPU seconds of one before that compiles."""
        begin = time.process_time()
        self.run()
        compiling = time.process_time() - begin
        return min((self.run() for _ in range(ROUNDS)), key=lambda t: t.finished), compiling


def together(name: str) -> None:
    """Wait for the other processes."""
    from maxpipe.devices import processes

    if processes.count() > 1:
        processes.coordinator().wait_at_barrier(f"{name}-{next(_BARRIERS)}", 600_000)


_BARRIERS = iter(range(10**9))


def gathered(value: float) -> list[float]:
    """Return a number of every process."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    everywhere: list[float] = multihost_utils.process_allgather(np.float32(value)).tolist()
    return everywhere


def measure(options: argparse.Namespace) -> None:
    """Run all schedules in this process; process 0 prints."""
    import jax
    import numpy as np

    from maxpipe.devices import processes
    from maxpipe.pipeline.schedules.load import load_schedule
    from maxpipe.plan.simulate import Costs, simulate

    show = print if jax.process_index() == 0 else lambda text: None
    load: Load = partial(busy, trips=options.trips)
    if options.sleep:
        load = partial(asleep, seconds=options.seconds)
    unit = seconds_of(load, options.size)
    show(f"a unit takes {1e3 * unit:.2f} ms; {jax.process_count()} processes")
    show(
        "schedule           units  dispatch us/unit  overhead us/unit  host us median   p99  "
        "compiling CPU s of each  run s   predicted s  difference"
    )
    for name in options.schedules:
        table = load_schedule(name, options.stages, options.microbatches, SCHEDULES[name])
        idle = Step(table, partial(busy, trips=1), options.size)
        empty, compiling = idle.best()
        full = Step(table, load, options.size)
        busy_step, _ = full.best()
        # The slowest process ends the step.
        measured = max(gathered(busy_step.finished))
        overhead = max(gathered(empty.finished))
        unit = min(unit, seconds_of(load, options.size))
        own, last = np.percentile(empty.units, (50, 99))
        seconds = "/".join(f"{s:.2f}" for s in gathered(compiling))
        predicted = simulate(table, Costs(unit, 2 * unit, unit, unit)).makespan
        show(
            f"{name:18} {idle.num_units:5}  {1e6 * empty.dispatched / len(empty.units):16.0f}  "
            f"{1e6 * overhead / idle.num_units:16.0f}  {1e6 * own:14.0f}  {1e6 * last:4.0f}  "
            f"{seconds:>23}  {measured:6.3f}  {predicted:11.3f}  {measured / predicted - 1:+9.1%}"
        )
        if options.trace:
            own = json.dumps(full.units())
            texts = processes.of_all_on_first(own)
            if units := [Unit(*fields) for text in texts for fields in json.loads(text)]:
                show(f"  {write_trace(Path(options.trace) / f'{name}.json', units)}")


def write_trace(file: Path, units: Sequence[Unit]) -> str:
    """Write the units of all stages and their transfers as Chrome's trace; return a summary.

    A transfer is drawn until the receiving stage, which does one thing after the other, finds that
    the arrays are there: it may be over before.
    """
    ends = {unit[:3]: unit.end for unit in units}
    first = min(unit.begin for unit in units)
    last: dict[int, float] = {}  # end of the unit before, on each stage
    idle, busy = [], []  # seconds that stages wait for transfers which begin while they ...
    events = []
    for unit in units:
        name = f"{unit.kind}{unit.chunk} of {unit.microbatch}"
        events.append(event(name, unit.stage, "units", unit.begin - first, unit.end - first))
        if unit.arrived is not None:
            sender = unit.chunk + (-1 if unit.kind == "F" else 1)
            sent = ends[unit.kind, sender, unit.microbatch]
            name = f"{unit.kind}{sender} of {unit.microbatch}"
            events.append(event(name, unit.stage, "arrivals", sent - first, unit.arrived - first))
            before = last.get(unit.stage, 0.0)
            waits = idle if before < sent else busy
            waits.append(max(0.0, unit.arrived - max(before, sent)))
        last[unit.stage] = unit.end
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"traceEvents": events}))
    latency = f", {1e3 * median(idle):.1f} ms each in the median" if idle else ""
    return (
        f"{len(idle)} transfers to a stage with nothing to do{latency}; {len(busy)} to one that "
        f"computed, and waited {1e3 * sum(busy):.1f} ms for all of them; {file}"
    )


def event(name: str, stage: int, row: str, begin: float, end: float) -> dict[str, object]:
    """Return an event of a trace, given its seconds."""
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"name": name, "ph": "X", "pid": f"stage {stage}", "tid": row, **times}


def start(options: argparse.Namespace) -> None:
    """Join the other processes, with this one's share of the devices."""
    import jax

    from maxpipe.devices.start import announced_processes, start_processes
    from maxpipe.devices.transfers import start_transfers

    jax.config.update("jax_num_cpu_devices", options.stages // announced_processes())
    if announced_processes() > 1:
        start_processes(100)
        start_transfers()


def spawn(argv: Sequence[str], count: int) -> int:
    """Run this script as several processes, and return the highest exit code."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *argv],
            env={
                **os.environ,
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            },
        )
        for index in range(count)
    ]
    return max(process.wait() for process in started)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, help="default: one for each process, at least 2")
    parser.add_argument("--processes", type=int, default=1, help="that share the stages")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=0.02, help="of a unit, about (default 0.02)"
    )
    parser.add_argument("--size", type=int, default=SIZE, help="of the matrices sent (default 64)")
    parser.add_argument("--trace", help="folder to write a trace of each schedule to")
    parser.add_argument("--trips", type=int, default=0, help="of a unit's loop, instead")
    parser.add_argument("--sleep", action="store_true", help="units sleep, and need no cores")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    options = parser.parse_args(argv)
    options.stages = options.stages or max(2, options.processes)
    if options.processes < 1 or options.stages % options.processes:
        parser.error("--processes: the stages are to be divided over the processes")
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.processes > 1 and "JAX_COORDINATOR_ADDRESS" not in os.environ:
        # Calibrated here, so that units of all processes are equally long.
        trips = options.trips or calibrated(options.seconds, options.size)
        words = sys.argv[1:] if argv is None else list(argv)
        return spawn([*words, f"--trips={trips}"], options.processes)
    start(options)
    options.trips = options.trips or calibrated(options.seconds, options.size)
    measure(options)
    return 0


def calibrated(seconds: float, size: int) -> int:
    """Return the trips of a loop that takes about so long."""
    return max(1, round(CALIBRATION * seconds / seconds_of(partial(busy, trips=CALIBRATION), size)))


if __name__ == "__main__":
    sys.exit(main())
