"""Measure the MPMD engine's overhead per unit, and compare real runs with the simulator.

    python scripts/benchmark/mpmd.py
    python scripts/benchmark/mpmd.py --stages 2 --microbatches 16 --seconds 0.05

All devices are simulated CPU devices. A chunk's forward, input gradient and weight gradient are
loops of equal length on one core each, so the machine needs as many idle cores as there are stages.
The prediction is the simulator's makespan with the time that such a unit took by itself. The
overhead is the time of a step whose units do next to nothing, by the number of units.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2}
ROUNDS = 5
SIZE = 64  # of matrices
CALIBRATION = 200  # trips


def busy(x: Any, trips: int) -> Any:
    """Return `x`, slowly: after a loop that XLA neither splits over cores nor removes."""
    import jax
    import jax.numpy as jnp

    return jax.lax.fori_loop(0, trips, lambda _, y: jnp.cos(y), x) * 1e-9 + x


def busy_model(num_chunks: int, trips: int) -> Any:
    """Build the loss of a matrix product; a chunk's F, I and W are a product and a loop each."""
    import jax
    import jax.numpy as jnp

    from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary

    @jax.custom_vjp
    def chunk(x: Any, w: Any) -> Any:
        return busy(x @ w, trips)

    def backward(residuals: Any, ct: Any) -> Any:
        x, w = residuals
        return busy(ct @ w.T, trips), busy(x.T @ ct, trips)

    chunk.defvjp(lambda x, w: (chunk(x, w), (x, w)), backward)

    def loss(w: Any, x: Any) -> Any:
        for c in range(num_chunks):
            x = mark_stage_boundary(chunk(x, w[c]))
        return jnp.sum(x)

    return loss


def seconds_of(trips: int) -> float:
    """Measure the time of one unit by itself."""
    import jax
    import jax.numpy as jnp

    unit = jax.jit(lambda x: busy(x @ x, trips))
    x = jnp.eye(SIZE)
    unit(x).block_until_ready()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        unit(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)


class Step:
    """One step of a schedule over a busy model, a device per stage."""

    def __init__(self, table: Any, trips: int):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from maxpipe.pipeline.engines.mpmd.runner import Runner, execution_order
        from maxpipe.pipeline.engines.mpmd.slicing import slice_program

        loss = busy_model(table.num_chunks, trips)
        identity = jnp.eye(SIZE)
        w, x = [identity] * table.num_chunks, identity
        program = slice_program(
            jax.make_jaxpr(jax.value_and_grad(loss))(w, x), split_backwards="W" in table.kinds
        )
        meshes = [Mesh(np.array([d]), ("stage",)) for d in jax.devices()[: table.num_stages]]
        replicated = [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]
        sums = [dict.fromkeys(range(program.num_outputs), sharding) for sharding in replicated]
        self._runner = Runner(program, table, meshes, [program.inputs[-1]], sums)
        self._replicated = replicated
        self._fixed = [
            {v: jax.device_put(identity, sharding) for v in program.inputs[:-1]}
            for sharding in replicated
        ]
        self._micro = [
            [{program.inputs[-1]: jax.device_put(identity, sharding)}] * table.num_microbatches
            for sharding in replicated
        ]
        self.num_units = len(execution_order(table))

    def run(self) -> tuple[float, float]:
        """Return seconds until all units are dispatched, and until all have run."""
        import jax
        import jax.numpy as jnp

        sums = [
            {i: jax.device_put(jnp.zeros((SIZE, SIZE) if i else ()), sharding) for i in outputs}
            for outputs, sharding in zip(self._runner.outputs, self._replicated, strict=True)
        ]
        jax.block_until_ready(sums)
        begin = time.perf_counter()
        sums = self._runner.run(self._fixed, self._micro, sums)
        dispatched = time.perf_counter() - begin
        jax.block_until_ready(sums)
        return dispatched, time.perf_counter() - begin

    def best(self) -> tuple[float, float]:
        """Return the fastest of some runs, after one that compiles."""
        self.run()
        return min((self.run() for _ in range(ROUNDS)), key=lambda times: times[1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=0.02, help="of a unit, about (default 0.02)"
    )
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    options = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"] = "cpu", str(options.stages)

    from maxpipe.pipeline.schedules.load import load_schedule
    from maxpipe.planning.simulate import Costs, simulate

    trips = round(CALIBRATION * options.seconds / seconds_of(CALIBRATION))
    unit = seconds_of(trips)
    print(f"a unit takes {1e3 * unit:.2f} ms")
    print(
        "schedule           units  dispatch us/unit  overhead us/unit  run s   predicted s  "
        "difference"
    )
    for name in options.schedules:
        table = load_schedule(name, options.stages, options.microbatches, SCHEDULES[name])
        idle = Step(table, 1)
        dispatch, empty = idle.best()
        _, measured = Step(table, trips).best()
        predicted = simulate(table, Costs(unit, 2 * unit, unit, unit)).makespan
        print(
            f"{name:18} {idle.num_units:5}  {1e6 * dispatch / idle.num_units:16.0f}  "
            f"{1e6 * empty / idle.num_units:16.0f}  {measured:6.3f}  {predicted:11.3f}  "
            f"{measured / predicted - 1:+9.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
