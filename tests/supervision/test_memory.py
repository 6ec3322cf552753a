"""Directories in memory of supervisors."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maxpipe.supervision import memory
from maxpipe.supervision.memory import MEMORY, memory_of_process, shared_memory

OWNER = """
import pathlib, sys, time
from maxpipe.supervision import memory
memory._SHARED = pathlib.Path(sys.argv[1])
with memory.shared_memory() as here:
    (here.path / "file").write_text("content")
    print(here.path, flush=True)
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_SHARED", tmp_path)
    return tmp_path


@pytest.fixture
def owner(shared):
    """Start a process that owns a directory; return it and the directory."""
    command = [sys.executable, "-c", OWNER, str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_shared_memory_is_there_until_its_owner_ends(shared):
    with shared_memory() as here:
        (here.path / "run").mkdir()
        assert [*shared.iterdir()] == [here.path]
        assert here.path.stat().st_mode & 0o777 == 0o700
    assert [*shared.iterdir()] == []


def test_shared_memory_of_a_killed_owner_is_removed_by_the_next(shared, owner):
    process, orphan = owner
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert orphan.is_dir()
    with shared_memory() as here:
        assert [*shared.iterdir()] == [here.path]


def test_shared_memory_of_a_living_owner_stays(shared, owner):
    with shared_memory():
        assert (owner[1] / "file").read_text() == "content"


def test_hold_owns_a_directory_that_was_removed_and_made_again(shared):
    with shared_memory() as here:
        shutil.rmtree(here.path)
        (here.path / "partner").mkdir(parents=True)  # as a copy of another host's steps does
        here.hold()
        with shared_memory():
            assert (here.path / "partner").is_dir()
        assert here.path.stat().st_mode & 0o777 == 0o700
    assert [*shared.iterdir()] == []


def test_hold_keeps_one_descriptor_however_often_the_directory_is_lost():
    with shared_memory() as here:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            shutil.rmtree(here.path)
            here.hold()
        assert len(os.listdir("/proc/self/fd")) == before


def test_hold_of_a_directory_that_another_removes_meanwhile_makes_it_again(monkeypatch):
    lock = fcntl.flock
    with shared_memory() as here:

        def remove_first(descriptor, operation):
            monkeypatch.setattr(fcntl, "flock", lock)
            with shared_memory():  # takes it for an orphan, since it is not locked yet
                assert not here.path.exists()
            lock(descriptor, operation)

        shutil.rmtree(here.path)
        monkeypatch.setattr(fcntl, "flock", remove_first)
        here.hold()
        with shared_memory():
            assert here.path.is_dir()


def test_shared_memory_where_there_is_none_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_SHARED", tmp_path / "nothing")
    with shared_memory() as here:
        assert here is None


def test_shared_memory_without_room_is_none(monkeypatch):
    def fail(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory.tempfile, "mkdtemp", fail)
    with shared_memory() as here:
        assert here is None


def test_memory_of_process_is_what_its_supervisor_passed(monkeypatch, tmp_path):
    monkeypatch.delenv(MEMORY, raising=False)
    assert memory_of_process() is None
    monkeypatch.setenv(MEMORY, os.fspath(tmp_path))
    assert memory_of_process() == tmp_path
