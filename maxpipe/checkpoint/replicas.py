"""Keep replicas of a run's newest steps in host memory, where they survive a trainer's death.

A supervisor makes a directory in memory (below /dev/shm), passes it to its trainer, and removes it
when the run ends: see `maxpipe.supervise.memory`. Every `checkpoint.replica_every` steps each
process writes its own shards there, in the background, and no other process's:

    <memory>/own/<run>/<step>/  a step as on disk: its record, and one database of arrays
    <memory>/partner/...        the supervisor's copy of `own` in another host's memory
    <memory>/copied             names of the steps of `own` that the partner's host has copied

A replica is committed by one rename, and verified like any checkpoint. Shards that a process did
not write read as zeros: after a change of the mesh the digests do not match.

A step can be restored if every process has it, so the two newest replicas are kept. The older one
is removed, and a new one begun, only when all processes and their partners have the newer one. A
replica that some process could not write is removed in all of them, with a warning only.
"""

import hashlib
import json
import math
import platform
import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from maxpipe.checkpoint.arrays import ITEM as ARRAYS
from maxpipe.checkpoint.arrays import Array, array_spec, box_of
from maxpipe.checkpoint.record import record_file
from maxpipe.checkpoint.steps import COPIED, PARTNER, StepsDirectory, remove_step
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.devices import processes
from maxpipe.devices.host_memory import free_memory
from maxpipe.storage.records import Damaged, read_record

KEY = "checkpoint.replica_every"
NO_SUPERVISOR = (
    "replicas lie in the memory of a supervisor, which restarts the run from them, and there is "
    "none: start with `maxpipe supervise -- python -m maxpipe.train ...` on Linux, or give 0"
)

COPIES = 2  # the newest replicas, as files, of this process and of its partner
BUFFERS = 1  # in the process: the copy from which a replica is being written

REMEDIES = (
    "use more hosts, or give 0; /dev/shm itself is enlarged by --shm-size in docker, in Kubernetes "
    "by an emptyDir with medium: Memory"
)


class Replicas:
    """Writes and finds the replicas of one run in the memory of this process's host.

    All processes make the object and the same calls together. `steps` has the steps whose replicas
    every process had at the start, without those dropped since. `memory` is the supervisor's `own`;
    replicas of another run than `run`, the directory of checkpoints, are removed from it.
    """

    def __init__(self, memory: Path, run: Path, every: int):
        self._name = hashlib.sha256(str(run.absolute()).encode()).hexdigest()[:16]
        self._directory = StepsDirectory(memory / self._name)
        self._copied = memory.parent / COPIED
        self._every = every
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._started: int | None = None
        self.is_behind = False  # a partner of some process lacks the newest replica
        _remove_except([self._name], memory)
        self.steps = _in_every_process(self._directory.steps())
        _remove_except(self.steps, self._directory.path)  # the others cannot be restored

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def of(self, step: int) -> Path:
        return self._directory.of(step)

    def drop(self, *steps: int) -> None:
        """Remove replicas of steps that will not be restored any more."""
        for step in steps:
            remove_step(self.of(step))
        self.steps = [step for step in self.steps if step not in steps]

    def finish(self) -> str:
        """Wait until every process has written its last replica; return a warning or ""."""
        self.wait()
        failure, self._failure = self._failure, None
        if not processes.agree(failure is None):
            assert self._started is not None
            remove_step(self.of(self._started))  # useless where it was written
            name = f"process {processes.index()}: {type(failure).__name__}"
            reasons = processes.of_all_on_first(f"{name}: {failure}" if failure else "")
            reason = next(filter(None, reasons), "")  # process 0 reports it
            return f"the last replica in memory could not be written: {reason}"
        was_behind, self.is_behind = self.is_behind, not processes.agree(self._is_copied())
        if not self.is_behind:
            # All have the newest one, so none will need the previous one.
            _remove_except(self._directory.steps()[-1:], self._directory.path)
        elif not was_behind:
            return "the last replica in memory is still being copied to a partner; none is begun"
        return ""

    def start(self, step: int, arrays: Mapping[str, Array], record: Mapping[str, object]) -> None:
        """After `finish`, start writing this process's shards of arrays that stay as they are."""
        self._started = step
        words = (step, arrays, record)
        self._writer = threading.Thread(target=self._write, args=words, name="replica", daemon=True)
        self._writer.start()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, step: int, arrays: Mapping[str, Array], record: Mapping[str, object]) -> None:
        scratch = self._directory.path / f"{step}.unfinished"
        try:
            write_shards(scratch / ARRAYS, arrays)
            file = record_file(scratch)
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(record))
            scratch.rename(self.of(step))
        except Exception as error:  # whatever it is, training goes on without a replica
            shutil.rmtree(scratch, ignore_errors=True)
            self._failure = error

    def _is_copied(self) -> bool:
        """Return whether the partner, if there is one with any steps, has the newest step."""
        try:
            names = read_record(self._copied, list[str])
        except Damaged:  # there is no partner, or the memory was lost
            return True
        newest = [f"{self._name}/{step}" for step in self._directory.steps()[-1:]]
        return not names or {*newest} <= {*names}


def _remove_except(kept: Sequence[object], directory: Path) -> None:
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in map(str, kept):
            remove_step(path)


def write_shards(database: Path, arrays: Mapping[str, Array]) -> None:
    """Write this process's shards of arrays, uncompressed, so that `arrays.load` reads them."""
    import tensorstore as ts

    context = ts.Context()
    codec = ts.CodecSpec({"driver": "zarr", "compressor": None})
    pending = []
    for name, array in arrays.items():
        if isinstance(array, jax.Array):
            chunk = array.sharding.shard_shape(array.shape)
            parts = [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]
        else:  # a NumPy array, the same everywhere
            chunk, parts = array.shape, [((), array)]
        store = ts.open(
            array_spec(database, name),
            create=True,
            dtype=ts.dtype(np.dtype(array.dtype).name),
            shape=array.shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=[max(size, 1) for size in chunk]),
            codec=codec,
            context=context,
        ).result()
        for box, shard in {box_of(index, array.shape): part for index, part in parts}.items():
            place = tuple(slice(start, stop) for start, stop in box)
            pending.append(store[place].write(shard, can_reference_source_data_indefinitely=True))
    for write in pending:
        write.result()


def _in_every_process(steps: list[int]) -> list[int]:
    """Return the steps of process 0 that all processes have, ascending; all processes call it."""
    count = processes.of_first_process(len(steps))
    # Another process may have fewer or others.
    padded = (*steps, *([-1] * count))[:count]
    proposed = [processes.of_first_process(step) for step in padded]
    return [step for step in proposed if processes.agree(step in steps)]


def reserve(abstract_state: object, memory: Path, every: int) -> str:
    """Return a line on the memory that replicas take on each host; all processes call this.

    `abstract_state` is as on disk, with shardings; `memory` and `every` are those of `Replicas`.
    Raises ConfigError in all processes if a host has too little memory.
    """
    memory.mkdir(parents=True, exist_ok=True)  # what is in memory is lost more easily than on disk
    index, count = processes.index(), processes.count()
    own = shard_bytes(abstract_state, index)
    parts, files = [memory], COPIES * own
    if (memory.parent / COPIED).is_file():
        parts.append(memory.parent / PARTNER)
        files += COPIES * shard_bytes(abstract_state, (index - 1) % count)
    free = (shutil.disk_usage(memory).free, free_memory())
    held = sum(map(_bytes_below, parts))
    shares = [Share(platform.node(), *free, held, files, BUFFERS * own)]
    if count > 1:
        processes.post(f"maxpipe/replicas/{index}", json.dumps(shares[0]))
        posted = [processes.read(f"maxpipe/replicas/{number}") for number in range(count)]
        shares = [Share(*json.loads(text)) for text in posted]
    return describe(shares, every)


class Share(NamedTuple):
    """What one process knows about the memory of its host, in bytes."""

    host: str
    shm_free: int  # in the file system of the replicas
    memory_free: int  # for that file system or anything else
    held: int  # by replicas that were there before this process began
    files: int  # of this process's replicas and of the copies of its partner's
    buffers: int  # of the copy from which a replica is being written


def describe(shares: Sequence[Share], every: int) -> str:
    """Return a line on the memory that hosts need and have; raise ConfigError if one lacks it."""
    amounts = []
    for host in dict.fromkeys(share.host for share in shares):
        # The free amounts were measured at different times.
        _, shm_free, memory_free, held, files, buffers = zip(
            *(share for share in shares if share.host == host), strict=True
        )
        need, room = sum(files) + sum(buffers), min(memory_free) + sum(held)
        for what, needed, free in (
            (f"/dev/shm on {host}", sum(files), min(shm_free) + sum(held)),
            (f"the memory of {host}", need, room),
        ):
            if needed > free:
                message = f"replicas take {needed:,} bytes of {what}, of which {free:,} are free"
                raise ConfigError(Problem(KEY, f"{message}: {REMEDIES}"))
        amounts.append((need, room))
    need, room = max(amounts)
    reason = f"replicas take {need:,} bytes of the memory of each host"
    return f"{KEY}={every}: {reason}, of which {room:,} are free"


def _bytes_below(directory: Path) -> int:
    """Return the size of a directory's files; the supervisor may remove some meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def shard_bytes(abstract_state: object, process: int) -> int:
    """Return the size of a process's distinct shards of a state, in bytes."""
    total = 0
    for leaf in jax.tree.leaves(abstract_state):
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        boxes = {
            box_of(index, leaf.shape)
            for device, index in indices.items()
            if device.process_index == process
        }
        elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
        total += elements * np.dtype(leaf.dtype).itemsize
    return total
