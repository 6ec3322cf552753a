"""Send arrays between devices of different processes; nothing else chooses how they travel.

Every process handles the same arrays. One whose devices all belong to other processes is absent
here: it has a shape and a layout, but no data. The processes of the sender and those of the
receiver make the same calls in the same order, and wait for nothing. So do all other processes: JAX
numbers transfers in each process by itself, and a sender and a receiver find each other by the
number.

`jax.device_put` moves the data: over sockets between CPUs, and on accelerators by what their
runtime offers, such as NCCL, or over sockets where it offers nothing.
"""

import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from maxpipe.devices import processes

_STREAMS = 4  # parallel connections between two processes
# A receiver waits for its sender, which may be compiling for an hour. Lost and hung processes are
# ended by heartbeats and the watchdog.
_TIMEOUT_SECONDS = 7 * 24 * 3600

_holders: list[socket.socket] = []  # they hold this process's port as long as it lives


def start_transfers() -> None:
    """Let this process exchange arrays over sockets; call after joining, before it has devices."""
    own = _own_address(processes.coordinator_address())
    place = f"[{own}]" if ":" in own else own
    # The port is held: the transfer server accepts no port 0, others learn the port from JAX, and
    # JAX listens there only from the first transfer on, maybe an hour later. Until then systems
    # give the port to no other program, and refuse one that asks for it without SO_REUSEADDR.
    holder = socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((own, 0))
    _holders.append(holder)
    port = holder.getsockname()[1]
    jax.config.update("jax_cross_host_transfer_socket_address", f"{place}:{port}")
    jax.config.update("jax_cross_host_transport_addresses", ",".join([f"{place}:0"] * _STREAMS))
    jax.config.update("jax_cross_host_transfer_timeout_seconds", _TIMEOUT_SECONDS)


def describe_transfers() -> str:
    """Return in words how arrays travel between processes; empty if they cannot.

    They cannot if JAX has started without the sockets that its devices need.
    """
    device = jax.local_devices()[0]
    if getattr(device.client, "supports_cross_host_transfers", False):
        return f"jax.device_put, by the {device.client.platform} runtime"
    address = jax.config.read("jax_cross_host_transfer_socket_address")
    if not address:
        return ""
    return f"jax.device_put, over sockets; process {jax.process_index()} is at {address}"


def is_here(mesh: Mesh) -> bool:
    return any(d.process_index == jax.process_index() for d in mesh.devices.flat)


def processes_of(mesh: Mesh) -> frozenset[int]:
    return frozenset(d.process_index for d in mesh.devices.flat)


def absent(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of other processes, given its shape, dtype and sharding."""
    assert like.sharding is not None
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, [], dtype=like.dtype)


def send(arrays: Sequence[jax.Array], targets: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copy arrays of one mesh to another; those sent to other processes are absent here.

    Args:
      arrays: arrays that are all on the same devices.
      targets: shardings of the copies, all on one set of devices. Between processes an array keeps
        its layout: the PartitionSpec, and the sizes of the axes that it names.
    """
    if not arrays:
        return []
    source, target = arrays[0].sharding, targets[0]
    crosses = _processes_of_devices(source) != _processes_of_devices(target)
    if crosses or source.has_addressable_devices:
        sent: list[jax.Array] = jax.device_put(list(arrays), list(targets))
        return sent
    return [
        absent(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target))
        for x, target in zip(arrays, targets, strict=True)
    ]


@lru_cache(maxsize=1024)
def _processes_of_devices(sharding: Sharding) -> frozenset[int]:
    devices: Iterable[jax.Device] = sharding.device_set
    return frozenset(device.process_index for device in devices)


def _own_address(coordinator: str) -> str:
    """Return the address by which this host reaches the coordinator, and others reach this host."""
    host, _, port = coordinator.rpartition(":")
    addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    # All hosts have to choose alike, so the order of a resolver's answers must not matter.
    family, kind, protocol, _, target = min(addresses, key=lambda info: info[0] != socket.AF_INET)
    # A datagram socket sends nothing when it connects; it only chooses an interface.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
