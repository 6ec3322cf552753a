"""Transfers within one process; tests/multiprocess/test_mpmd.py has those between processes."""

import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.devices import processes, transfers
from maxpipe.devices.transfers import is_here, processes_of, send, start_transfers

FLAGS = (
    "jax_cross_host_transfer_socket_address",
    "jax_cross_host_transport_addresses",
    "jax_cross_host_transfer_timeout_seconds",
)


def test_send_within_a_process_copies_arrays_to_the_other_devices():
    source, target = (Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2])
    assert is_here(target)
    assert processes_of(target) == {0}
    arrays = jax.device_put(
        [jnp.arange(3.0), jnp.ones(2)], NamedSharding(source, PartitionSpec("data"))
    )
    targets = [NamedSharding(target, PartitionSpec("data"))] * 2
    copies = send(arrays, targets)
    assert [x.sharding for x in copies] == targets
    np.testing.assert_array_equal(copies[0], [0, 1, 2])
    assert send([], []) == []


def test_start_transfers_holds_a_port_of_the_interface_towards_the_coordinator(monkeypatch):
    before = {flag: jax.config.read(flag) for flag in FLAGS}
    monkeypatch.setattr(processes, "coordinator_address", lambda: "localhost:1234")
    try:
        start_transfers()
        host, _, port = jax.config.read(FLAGS[0]).partition(":")
        assert host == "127.0.0.1"
        # JAX listens there at the first transfer; until then no other program gets the port.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.create_server((host, int(port))):
            pass
        # A receiver waits as long as a sender compiles; the default is a minute.
        assert jax.config.read(FLAGS[2]) > 24 * 3600
    finally:
        transfers._holders.pop().close()
        for flag, value in before.items():
            jax.config.update(flag, value)
