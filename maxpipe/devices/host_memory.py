"""Copy arrays between device and host memory, and say how much of the host's is free."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

# Kinds of memory, as JAX names them.
DEVICE, HOST = "device", "pinned_host"

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # of this container


def has_host_memory(device: jax.Device) -> bool:
    return HOST in {memory.kind for memory in device.addressable_memories()}


def move(array: jax.Array, memory_kind: str) -> jax.Array:
    """Return a finished copy in another memory of the same devices; each process copies its shards.

    `jax.device_put` of an array that several processes share would run a program on all devices
    instead. A series of such programs sometimes hangs on CPUs, where collectives wait for threads
    that other collectives hold.

    Args:
      array: an array of any sharding.
      memory_kind: kind of the other memory, such as `pinned_host`.
    """
    shards = [
        jax.device_put(
            shard.data, jax.sharding.SingleDeviceSharding(shard.device, memory_kind=memory_kind)
        )
        for shard in array.block_until_ready().addressable_shards
    ]
    sharding = array.sharding.with_memory_kind(memory_kind)
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, shards
    ).block_until_ready()


def to_host(leaf: jax.Array) -> np.ndarray | jax.Array:
    """Return a copy that later steps cannot overwrite.

    It is a NumPy array if this process holds all of the leaf. With several processes it is an array
    in pinned host memory, or where devices have none a copy in their own memory.
    """
    if leaf.is_fully_addressable:
        return np.array(leaf)
    device: jax.Device = next(iter(leaf.sharding.device_set))
    if has_host_memory(device):
        return move(leaf, HOST)
    return jnp.copy(leaf)


def free_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return how many bytes of memory the host and a container have free for this process.

    `cgroup` is the directory of the container's cgroup, version 2; without one there is no limit.
    """
    available = 1024 * _numbers(meminfo.read_text().replace(":", ""))["MemAvailable"]
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cached = _numbers((cgroup / "memory.stat").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return available
    # Memory that caches files on disk is given up when it is needed.
    used -= cached["inactive_file"] + cached["active_file"]
    return max(min(available, limit - used), 0)


def _numbers(text: str) -> dict[str, int]:
    """Return the first number of each line after its name."""
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines())}
