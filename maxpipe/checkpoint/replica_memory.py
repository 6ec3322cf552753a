"""Count the host memory that replicas take, and refuse a run whose hosts have too little."""

import json
import math
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from maxpipe.checkpoint.arrays import box_of
from maxpipe.checkpoint.steps import COPIED, PARTNER
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.devices import processes
from maxpipe.devices.host_memory import free_memory
from maxpipe.storage.records import parse_record

KEY = "checkpoint.replica_every"
NO_SUPERVISOR = (
    "replicas lie in the memory of a supervisor, which restarts the run from them, and there is "
    "none: start with `maxpipe supervise -- python -m maxpipe.train ...` on Linux, or give 0"
)

COPIES = 2  # the newest replicas, as files
BUFFERS = 1  # in the process: the copy from which a replica is being written
PARTNER_COPIES = 2  # of the previous process's replicas, if this one's supervisor copies them

NO_ROOM = (
    "enlarge /dev/shm (docker: --shm-size, Kubernetes: an emptyDir with medium: Memory), use more "
    "hosts, or give 0"
)

NO_MEMORY = "use more hosts, or give 0"


@dataclass(frozen=True)
class Share:
    """What one process knows about the memory of its host, in bytes."""

    host: str
    shm_free: int  # in the file system of the replicas
    memory_free: int  # for that file system or anything else
    held: int  # by replicas that were there before this process began
    files: int  # of this process's replicas and of the copies of its partner's
    buffers: int  # of the copy from which a replica is being written


def reserve(abstract_state: object, memory: Path, every: int) -> str:
    """Return a line on the memory that replicas take on each host; all processes call this.

    Args:
      abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, as on disk.
      memory: the directory `own` within the supervisor's directory.
      every: `checkpoint.replica_every`.

    Raises:
      ConfigError: a host has too little memory; raised in all processes.
    """
    memory.mkdir(parents=True, exist_ok=True)  # what is in memory is lost more easily than on disk
    index, count = processes.index(), processes.count()
    own = shard_bytes(abstract_state, index)
    parts, files = [memory], COPIES * own
    if (memory.parent / COPIED).is_file():
        parts.append(memory.parent / PARTNER)
        files += PARTNER_COPIES * shard_bytes(abstract_state, (index - 1) % count)
    held = sum(map(_bytes_below, parts))
    free = shutil.disk_usage(memory).free, free_memory()
    share = Share(platform.node(), *free, held, files, BUFFERS * own)
    return describe(_of_all_processes(share), every)


def describe(shares: Sequence[Share], every: int) -> str:
    """Return a line on the memory that hosts need and have; raise ConfigError if one lacks it."""
    of_hosts: dict[str, Share] = {}
    for share in shares:
        others = of_hosts.get(share.host)
        of_hosts[share.host] = _together(others, share) if others else share
    for host, share in of_hosts.items():
        for need, free, what, remedy in (
            (share.files, share.shm_free, f"/dev/shm on {host}", NO_ROOM),
            (share.files + share.buffers, share.memory_free, f"the memory of {host}", NO_MEMORY),
        ):
            if need > (room := free + share.held):
                message = f"replicas take {need:,} bytes of {what}, of which {room:,} are free"
                raise ConfigError(Problem(KEY, f"{message}: {remedy}"))
    most = max(of_hosts.values(), key=lambda share: share.files + share.buffers)
    reason = f"replicas take {most.files + most.buffers:,} bytes of the memory of each host"
    return f"{KEY}={every}: {reason}, of which {most.memory_free + most.held:,} are free"


def _bytes_below(directory: Path) -> int:
    """Return the size of a directory's files; the supervisor may remove some meanwhile."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _together(share: Share, other: Share) -> Share:
    """Return what two processes on the same host need together, and the memory that is free."""
    return Share(
        share.host,
        min(share.shm_free, other.shm_free),  # measured at different times
        min(share.memory_free, other.memory_free),
        share.held + other.held,
        share.files + other.files,
        share.buffers + other.buffers,
    )


def shard_bytes(abstract_state: object, process: int) -> int:
    """Return the size of a process's distinct shards of a state, in bytes."""
    return sum(_leaf_bytes(leaf, process) for leaf in jax.tree.leaves(abstract_state))


def _leaf_bytes(leaf: jax.ShapeDtypeStruct, process: int) -> int:
    indices: Mapping[jax.Device, tuple[slice, ...]] = leaf.sharding.devices_indices_map(leaf.shape)
    boxes = {
        box_of(index, leaf.shape)
        for device, index in indices.items()
        if device.process_index == process
    }
    elements = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    return elements * np.dtype(leaf.dtype).itemsize


def _of_all_processes(share: Share) -> list[Share]:
    if processes.count() == 1:
        return [share]
    keys = [f"maxpipe/replicas/{index}" for index in range(processes.count())]
    processes.post(keys[processes.index()], json.dumps(asdict(share)))
    return [parse_record(processes.read(key), Share) for key in keys]
