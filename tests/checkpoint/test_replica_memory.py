"""The memory that replicas take, and what the host has of it."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.checkpoint.replicas import (
    BUFFERS,
    COPIES,
    Share,
    describe,
    reserve,
    shard_bytes,
)
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


def test_describe_counts_earlier_replicas_as_free_and_the_copy_being_written_as_memory_only():
    line = describe([Share("one", 100, 100, held=200, files=300, buffers=0)], 10)
    assert line.endswith("of which 300 are free")
    assert describe([Share("one", 200, 300, held=0, files=200, buffers=100)], 10)


def test_describe_with_too_little_on_one_host_names_it_and_a_remedy():
    for shm_free, memory_free, message in [
        (1199, 9000, "1,200 bytes of /dev/shm on two, of which 1,199 are free: enlarge /dev/shm"),
        (1200, 1799, "1,800 bytes of the memory of two, of which 1,799 are free: use more hosts"),
    ]:
        shares = [Share(host, shm_free, memory_free, 0, 600, 300) for host in ("one", "two", "two")]
        with pytest.raises(ConfigError) as error:
            describe(shares, 10)
        (problem,) = error.value.problems
        assert problem.key == "checkpoint.replica_every"
        assert message in problem.message
        assert "give 0" in problem.message


@pytest.fixture
def free(monkeypatch):
    """Return free(bytes), after which a host has so many of memory, and enough in /dev/shm."""

    def _free(size):
        monkeypatch.setattr("maxpipe.checkpoint.replicas.free_memory", lambda: size)

    return _free


def test_reserve_counts_the_files_of_an_earlier_process(tmp_path, free):
    free(700)
    needed = (COPIES + BUFFERS) * shard_bytes(STATE, 0)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "data").write_bytes(bytes(needed - 700))
    assert f"of which {needed} are free" in reserve(STATE, tmp_path, 5)
    (tmp_path / "5" / "data").write_bytes(bytes(needed - 701))
    with pytest.raises(ConfigError, match=r"checkpoint\.replica_every"):
        reserve(STATE, tmp_path, 5)


def test_reserve_with_a_partner_counts_its_replicas_too(tmp_path, free):
    free(10**6)
    (tmp_path / "own").mkdir()
    alone = COPIES + BUFFERS
    assert f"take {alone * shard_bytes(STATE, 0):,} bytes" in reserve(STATE, tmp_path / "own", 5)
    (tmp_path / "copied").write_text("[]")
    (tmp_path / "partner").mkdir()
    (tmp_path / "partner" / "data").write_bytes(bytes(1000))
    line = reserve(STATE, tmp_path / "own", 5)
    assert f"take {(alone + 2) * shard_bytes(STATE, 0):,} bytes" in line
    assert "of which 1,001,000 are free" in line


def test_reserve_passes_over_files_that_are_removed_meanwhile(tmp_path, free, monkeypatch):
    free(10**6)
    for name in ("kept", "removed"):
        (tmp_path / name).write_bytes(bytes(1000))
    stat = os.stat

    def vanishing(path, **options):
        if str(path).endswith("removed"):
            raise FileNotFoundError(path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", vanishing)
    assert "of which 1,001,000 are free" in reserve(STATE, tmp_path, 5)


def test_reserve_makes_a_memory_again_that_was_removed(tmp_path):
    assert "replicas take" in reserve(STATE, tmp_path / "removed" / "own", 5)
    assert (tmp_path / "removed" / "own").is_dir()
