"""Directories in memory of supervisors."""

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
with memory.shared_memory() as directory:
    (directory / "file").write_text("content")
    print(directory, flush=True)
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
    with shared_memory() as directory:
        (directory / "run").mkdir()
        assert [*shared.iterdir()] == [directory]
        assert directory.stat().st_mode & 0o777 == 0o700
    assert [*shared.iterdir()] == []


def test_shared_memory_of_a_killed_owner_is_removed_by_the_next(shared, owner):
    process, orphan = owner
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert orphan.is_dir()
    with shared_memory() as directory:
        assert [*shared.iterdir()] == [directory]


def test_shared_memory_of_a_living_owner_stays(shared, owner):
    with shared_memory():
        assert (owner[1] / "file").read_text() == "content"


def test_hold_owns_a_directory_that_was_removed_and_made_again(shared):
    with shared_memory() as directory:
        shutil.rmtree(directory)
        (directory / "partner").mkdir(parents=True)  # as a copy of another host's steps does
        memory.hold(directory)
        with shared_memory():
            assert (directory / "partner").is_dir()
        assert directory.stat().st_mode & 0o777 == 0o700
    assert [*shared.iterdir()] == []


def test_shared_memory_where_there_is_none_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_SHARED", tmp_path / "nothing")
    with shared_memory() as directory:
        assert directory is None


def test_memory_of_process_is_what_its_supervisor_passed(monkeypatch, tmp_path):
    monkeypatch.delenv(MEMORY, raising=False)
    assert memory_of_process() is None
    monkeypatch.setenv(MEMORY, os.fspath(tmp_path))
    assert memory_of_process() == tmp_path
