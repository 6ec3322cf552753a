"""Directories in memory of supervisors."""

import os
import shutil

import pytest

from maxpipe.supervise import memory
from maxpipe.supervise.memory import MEMORY, hold, memory_of_process, shared_memory


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_SHARED", tmp_path)
    return tmp_path


def test_shared_memory_is_there_until_its_owner_ends(shared):
    with shared_memory() as here:
        shutil.rmtree(here)
        (here / "run").mkdir(parents=True)  # as a copy of another host's steps does
        hold(here)
        assert here.stat().st_mode & 0o777 == 0o700
        with shared_memory():
            assert (here / "run").is_dir()
    assert [*shared.iterdir()] == []


def test_shared_memory_removes_what_killed_owners_have_left_and_nothing_else(shared):
    for name in ("killed", "of-another-program"):
        (shared / f"maxpipe-replicas-{name}" / "run").mkdir(parents=True)
    (shared / "maxpipe-replicas-killed.lock").touch()  # its lock ended, in whatever container
    with shared_memory():
        names = {path.name for path in shared.iterdir()}
    assert "maxpipe-replicas-of-another-program" in names
    assert not any(name.startswith("maxpipe-replicas-killed") for name in names)


def test_shared_memory_where_there_is_none_or_no_room_is_none(monkeypatch, shared):
    monkeypatch.setattr(memory, "_SHARED", shared / "nothing")
    with shared_memory() as here:
        assert here is None


def test_memory_of_process_is_what_its_supervisor_passed(monkeypatch, tmp_path):
    monkeypatch.delenv(MEMORY, raising=False)
    assert memory_of_process() is None
    monkeypatch.setenv(MEMORY, os.fspath(tmp_path))
    assert memory_of_process() == tmp_path
