"""Count the host memory that replicas take, and refuse a run whose hosts have too little."""

import json
import math
import platform
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from maxpipe.checkpoint.arrays import box_of
from maxpipe.checkpoint.steps import COPIED, PARTNER
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.devices import processes

KEY = "checkpoint.replica_every"
NO_MEMORY = (
    "replicas lie in the memory of a supervisor, which restarts the run from them, and there is "
    "none: start with `maxpipe supervise -- python -m maxpipe.train ...` on Linux, or give 0"
)

COPIES = 3  # the two newest replicas, and the copy from which one is being written
PARTNER_COPIES = 2  # of the process before, if its replicas are copied to this one's supervisor

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Share:
    """What one process knows about the memory of its host.

    Attributes:
      host: its name.
      free: bytes that are free in it for the directory of replicas.
      held: bytes of replicas that are there, from before this process began.
      needed: bytes for those of this process, and for a partner's copies.
    """

    host: str
    free: int
    held: int
    needed: int


def reserve(abstract_state: object, memory: Path, every: int) -> str:
    """Return a line on the memory that replicas take on each host; all processes call this.

    Args:
      abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, as on disk.
      memory: `own` of the supervisor's directory.
      every: `checkpoint.replica_every`.

    Raises:
      ConfigError: a host has too little; raised in all processes.
    """
    index, count = processes.index(), processes.count()
    parts, needed = [memory], COPIES * shard_bytes(abstract_state, index)
    if (memory.parent / COPIED).is_file():
        parts.append(memory.parent / PARTNER)
        needed += PARTNER_COPIES * shard_bytes(abstract_state, (index - 1) % count)
    files = [path for part in parts for path in part.rglob("*") if path.is_file()]
    held = sum(path.stat().st_size for path in files)
    share = Share(platform.node(), free_bytes(memory), held, needed)
    return describe(_of_all_processes(share), every)


def describe(shares: Sequence[Share], every: int) -> str:
    """Return a line on what the hosts need and have; raise ConfigError if that is too little."""
    needed: dict[str, int] = defaultdict(int)
    room: dict[str, int] = {}
    held: dict[str, int] = defaultdict(int)
    for share in shares:
        needed[share.host] += share.needed
        held[share.host] += share.held
        # They look at different times.
        room[share.host] = min(share.free, room.get(share.host, share.free))
    lacking = [host for host in needed if needed[host] > room[host] + held[host]]
    if lacking:
        host = lacking[0]
        message = (
            f"replicas take {needed[host]:,} bytes of the memory of {host}, of which "
            f"{room[host] + held[host]:,} are free (/dev/shm and all): give 0, or use more hosts"
        )
        raise ConfigError(Problem(KEY, message))
    most = max(needed, key=lambda host: needed[host])
    reason = f"replicas take {needed[most]:,} bytes of the memory of each host"
    return f"{KEY}={every}: {reason}, of which {room[most] + held[most]:,} are free"


def shard_bytes(abstract_state: object, process: int) -> int:
    """Return the bytes of a process's distinct shards of a state."""
    return sum(_leaf_bytes(leaf, process) for leaf in jax.tree.leaves(abstract_state))


def free_bytes(memory: Path) -> int:
    """Return how many bytes a directory in memory can still take."""
    lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    available = 1024 * int(lines["MemAvailable"].split()[0])
    return min(available, shutil.disk_usage(memory).free)


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
    return [Share(**json.loads(processes.read(key))) for key in keys]
