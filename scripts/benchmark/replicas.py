"""Measure what replicas in memory cost a step, and what they save after a death.

    python scripts/benchmark/replicas.py ratio --blocks 8 --every 10
    python scripts/benchmark/replicas.py restart --processes 4

`ratio` times `--every` steps and a replica by themselves, in turns, in one process on one device:
blocks with and without a replica differ by less than they scatter. It prints medians, and by how
much a replica every so many steps lengthens the steps: in CPU time, which the replica takes from
them while it is written, and in the wall time for which the loop waits. `restart` kills a
trainer by SIGKILL and takes the time to the first step that had not been finished before: from
replicas and from the disk under a supervisor, and from the disk without one, started by hand as
soon as all processes have ended; from replicas also with a cache that holds the compiled step.
The CPU time of the new processes says what it takes on a machine that does nothing else: a busy one
stretches the seconds. Linux only.
"""

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from process_time import cpu_seconds
from supervised_run import Processes, small_model, wait_until

SIZE = {
    "model.num_layers": 4,
    "model.embed_dim": 192,
    "model.num_query_heads": 3,
    "model.num_kv_heads": 3,
    "model.head_dim": 64,
    "model.mlp_dim": 768,
    "model.vocab_size": 1024,
    "data.sequence_length": 128,
    "data.global_batch_size": 32,
    "eval.every": 0,
    "pipeline.engine": "sequential",
}
SAVE_EVERY = 100
SUPERVISOR = ("--pause", "0.1")
HEARTBEAT_SECONDS = 10  # of the run without supervisors, which waits for it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(argv)
    if options.what == "ratio":
        measure_ratio(options.blocks, options.every)
    else:
        measure_restart(options.processes, options.every)
    return 0


def measure_ratio(blocks: int, every: int) -> None:
    """Print the times of steps and of a replica, and by how much it lengthens them."""
    import jax
    import numpy as np

    from maxpipe.builder import build_trainer
    from maxpipe.checkpoint.manager import Checkpointer
    from maxpipe.checkpoint.replicas import Replicas, shard_bytes
    from maxpipe.config import Config, replace, resolve
    from maxpipe.devices.mesh import build_mesh
    from maxpipe.supervise.memory import shared_memory
    from maxpipe.training.batches import BatchPlacer

    config = resolve(replace(Config(), **SIZE), 1)
    mesh = build_mesh(config, jax.devices()[:1])
    trainer = build_trainer(config, mesh, note=lambda _: None)
    rows, length = config.data.global_batch_size, config.data.sequence_length
    tokens = np.random.default_rng(0).integers(0, 1024, (rows, length + 1)).astype(np.int32)
    batch = BatchPlacer(mesh, trainer.batch_spec, rows)(
        {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
            "segment_ids": np.ones((rows, length), np.int32),
            "weights": np.ones((rows, length), np.float32),
        }
    )
    state = trainer.init(jax.random.key(0))
    size = shard_bytes(trainer.abstract_canonical(), 0)
    position = np.zeros((rows, 3), np.int64)
    with shared_memory() as memory, tempfile.TemporaryDirectory() as run:
        replicas = Replicas(memory, Path(run), every)
        checkpointer = Checkpointer(Path(run), config.checkpoint, replicas=replicas)

        def steps() -> None:
            nonlocal state
            for _ in range(every):
                state, metrics = trainer.step(state, batch)
            jax.block_until_ready((state, metrics))

        def begin(step: int) -> None:
            checkpointer.replicate(step, trainer.to_canonical(state), position, {})

        rows_of: dict[str, list[Times]] = {"steps": [], "begin": [], "write": []}
        for number in range(-1, blocks):  # the first turn compiles
            measured = {
                "steps": times_of(steps),
                "begin": times_of(lambda number=number: begin(every * (number + 2))),
                "write": times_of(replicas.wait),
            }
            for what, times in measured.items():
                rows_of[what] += [times] * (number >= 0)
    steps_, begin_, write = (
        Times(*map(statistics.median, zip(*rows, strict=True))) for rows in rows_of.values()
    )
    print(f"{size / 1e6:.0f} MB of state, a replica every {every} steps, {blocks} turns")
    print(f"a step        {describe(steps_, 1 / every)}")
    print(f"a replica     {describe(begin_)} until the loop goes on")
    print(f"              {describe(write)} more until it is written")
    print(
        f"ratio         CPU {1 + (begin_.cpu + write.cpu) / steps_.cpu:.4f}, "
        f"wall {1 + begin_.wall / steps_.wall:.4f}"
    )


class Times(NamedTuple):
    """Seconds of a call: of the clock, and of this process's threads on all cores."""

    wall: float
    cpu: float


def times_of(work: Callable[[], object]) -> Times:
    """Return the times of a call."""
    before, started = time.process_time(), time.perf_counter()
    work()
    return Times(time.perf_counter() - started, time.process_time() - before)


def describe(times: Times, share: float = 1.0) -> str:
    """Return times in milliseconds, or a share of them."""
    return f"{1e3 * share * times.wall:8.1f} ms wall, {1e3 * share * times.cpu:8.1f} ms CPU"


def measure_restart(processes: int, every: int) -> None:
    """Print the time from a death to the next new step, from memory and from the disk."""
    print(f"{processes} processes, a checkpoint every {SAVE_EVERY} steps, a replica every {every}")
    disk = [*small_model(processes), f"checkpoint.every={SAVE_EVERY}"]
    memory = [*disk, f"checkpoint.replica_every={every}"]
    by_hand = [*disk, f"mesh.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}"]
    with tempfile.TemporaryDirectory(prefix="maxpipe-restart-") as directory:
        ready = [*memory, f"compile.cache_dir={directory}/cache"]
        for what, words, supervisor in (
            ("replicas and a ready executable", ready, SUPERVISOR),
            ("replicas", memory, SUPERVISOR),
            ("supervisor, disk", disk, SUPERVISOR),
            ("by hand, disk", by_hand, None),
        ):
            run = Path(directory, what.replace(" ", "-"))
            run.mkdir()
            restart = _restart(run, processes, words, supervisor)
            load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
            print(f"{what:<34}{restart}, {load}", flush=True)


def _restart(
    directory: Path, count: int, words: list[str], supervisor: Sequence[str] | None
) -> str:
    """Kill a trainer; return in words how long the next new step took and what was repeated."""
    aim = 2 * SAVE_EVERY - 5
    words = [*words, "steps=100000", f"output_dir={directory}"]
    with Processes(directory, count, words, supervisor) as run:
        wait_until(lambda: run.last_step() >= aim, run)
        run.send(count - 1, signal.SIGKILL)
        began = time.monotonic()
        if supervisor is None:
            run.wait_until_ended()
            last = run.last_step()
            with Processes(directory, count, words, None) as again:
                return _until_new_step(again, began, last)
        wait_until(lambda: "restart 1" in run.output(), run)
        return _until_new_step(run, began, run.last_step())


def _until_new_step(run: Processes, began: float, last: int) -> str:
    def output() -> str:
        return run.output().rpartition("resumed after step ")[2]

    wait_until(lambda: "resumed after step " in run.output(), run)
    resumed = int(output().split(maxsplit=1)[0])
    wait_until(lambda: bool(re.search(rf"\nstep +{last + 1}/", output())), run)
    seconds = time.monotonic() - began
    trainers = [run.trainer(index) for index in range(len(run.pids))]
    cpu = sum(cpu_seconds(trainer) for trainer in trainers if trainer is not None)
    return f"{seconds:5.1f} s, {cpu:5.1f} s of CPU since the start, {last - resumed} steps repeated"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("ratio", "restart"))
    parser.add_argument(
        "--blocks", type=int, default=8, help="of `ratio`, turns (default: %(default)s)"
    )
    parser.add_argument("--every", type=int, default=10, help="steps (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="of `restart`")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
