"""The memory that replicas take, and what the host has of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.checkpoint.replicas import BUFFERS, COPIES, Share, describe, reserve, shard_bytes
from maxpipe.config.errors import ConfigError

MESH = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


def leaf(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*spec)))


STATE = {
    "split": leaf((8, 4), jnp.float32, "a", "b"),
    "copied": leaf((8, 4), jnp.float32, "a"),  # on four devices each
    "scalar": leaf((), jnp.int32),
    "half": leaf((6,), jnp.bfloat16, "a"),
}


def test_shard_bytes_count_copies_on_several_devices_once():
    assert shard_bytes(STATE, process=0) == 8 * 4 * 4 + 8 * 4 * 4 + 4 + 6 * 2
    assert shard_bytes(STATE, process=1) == 0


def test_describe_adds_processes_of_a_host_and_names_the_fullest():
    shares = [
        Share("one", 1000, 1000, held=0, files=200, buffers=100),
        Share("two", 5000, 5000, held=0, files=1000, buffers=1000),
        Share("two", 4000, 4000, held=0, files=1000, buffers=1000),
    ]
    assert describe(shares, 10) == (
        "checkpoint.replica_every=10: replicas take 4,000 bytes of the memory of each host, "
        "of which 4,000 are free"
    )
    # Earlier replicas count as free, and the copy being written as memory only.
    line = describe([Share("one", 100, 100, held=200, files=300, buffers=0)], 10)
    assert line.endswith("of which 300 are free")
    assert describe([Share("one", 200, 300, held=0, files=200, buffers=100)], 10)


@pytest.mark.parametrize(
    ("shm_free", "memory_free", "message"),
    [
        (1199, 9000, "1,200 bytes of /dev/shm on two, of which 1,199 are free"),
        (1200, 1799, "1,800 bytes of the memory of two, of which 1,799 are free"),
    ],
)
def test_describe_with_too_little_on_one_host_names_it_and_a_remedy(shm_free, memory_free, message):
    shares = [Share(host, shm_free, memory_free, 0, 600, 300) for host in ("one", "two", "two")]
    match = rf"checkpoint\.replica_every: .*{message}: use more hosts, or give 0"
    with pytest.raises(ConfigError, match=match):
        describe(shares, 10)


def test_reserve_counts_files_that_are_there_and_the_replicas_of_a_partner(tmp_path, monkeypatch):
    monkeypatch.setattr("maxpipe.checkpoint.replicas.free_memory", lambda: 700)
    own, size = tmp_path / "made" / "own", shard_bytes(STATE, 0)
    needed = (COPIES + BUFFERS) * size
    with pytest.raises(ConfigError, match=r"checkpoint\.replica_every"):
        reserve(STATE, own, 5)  # which makes the directory
    (own / "5").mkdir()
    (own / "5" / "data").write_bytes(bytes(needed - 700))
    line = reserve(STATE, own, 5)
    assert f"take {needed:,} bytes" in line
    assert f"of which {needed:,} are free" in line
    (own.parent / "copied").write_text("[]")
    (own.parent / "partner").mkdir()
    (own.parent / "partner" / "data").write_bytes(bytes(1000))
    line = reserve(STATE, own, 5)
    assert f"take {needed + 2 * size:,} bytes" in line
    assert f"of which {needed + 1000:,} are free" in line
