"""Leases of a directory: one owner at a time, and who may take over from whom. Without JAX."""

import dataclasses
import errno
import os
import re
import threading
import time
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import fsspec
import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.storage import lease as lease_module
from maxpipe.storage.lease import (
    LEASE_SECONDS,
    NAME,
    LeaseDirectory,
    LeaseObjects,
    Owner,
    acquire,
    start_of_process,
)
from maxpipe.storage.object_store import Deadline, open_store

GUARD = lease_module._GUARD


@pytest.fixture
def place(tmp_path):
    return LeaseDirectory(tmp_path / "run")


@pytest.fixture
def lines():
    return []


def elsewhere(job="", attempt=0):
    return dataclasses.replace(Owner.this_process(job, attempt), host="other", machine="other")


def names(place):
    return sorted(path.name for path in place._path.iterdir())


class Waiting:
    """A `sleep` that records the seconds and may do something instead of waiting."""

    def __init__(self, act=lambda: None):
        self.seconds = 0.0
        self.act = act

    def __call__(self, seconds):
        self.seconds += seconds
        self.act()


def test_lease_of_a_live_process_is_refused_at_once(place, lines):
    pid = os.getppid()
    alive = dataclasses.replace(
        Owner.this_process("job", 1), pid=pid, process_started=start_of_process(pid)
    )
    place.create(NAME, alive.to_json())
    for owner in (Owner.this_process(), Owner.this_process("job", 2)):
        who = f"is in use by process {pid} on {os.uname().nodename} since 20"
        with pytest.raises(ConfigError, match=who):
            acquire(place, owner, lines.append, sleep=pytest.fail)
    assert lines == []
    assert names(place) == [NAME]
    # Another machine cannot see the process, but that it renews its lease.
    waiting = Waiting(lambda: os.utime(place._path / NAME, (2**31, 2**31)))
    with pytest.raises(ConfigError):
        acquire(place, elsewhere(), lines.append, sleep=waiting)
    assert waiting.seconds == 1
    assert "waiting up to 30 s to see whether that process lives" in lines[0]


# Owner of the lease, whether it is of another machine, who asks, and why it may take over.
TAKEN_OVER = [
    (("job", 1), False, ("", 0), "which has ended"),
    (("job", 1), True, ("job", 2), "an earlier attempt of job job"),
    (("job", 1), True, ("job", 1), "which has not renewed its lease for 30 s"),
    (("job", 1), True, ("another", 2), "which has not renewed its lease for 30 s"),
    (("job", 1), True, ("", 2), "which has not renewed its lease for 30 s"),
    (("", 0), True, ("", 1), "which has not renewed its lease for 30 s"),
]


@pytest.mark.parametrize(("holder", "is_elsewhere", "other", "reason"), TAKEN_OVER)
def test_lease_of_a_dead_process_is_taken_over(place, lines, holder, is_elsewhere, other, reason):
    dead_owner(place, *holder)
    waiting = Waiting()
    asking = elsewhere(*other) if is_elsewhere else Owner.this_process(*other)
    acquire(place, asking, lines.append, sleep=waiting).release()
    assert lines[-1].endswith(f", {reason}")
    assert waiting.seconds == LEASE_SECONDS * ("not renewed" in reason)
    assert names(place) == []


def test_lease_that_names_no_owner_expires(place, lines):
    place.create("other", "")
    for text in ("", '{"start": "x"}', elsewhere().to_json().replace("pid", "more")):
        (place._path / NAME).write_text(text)
        waiting = Waiting()
        acquire(place, Owner.this_process("job", 2), lines.append, sleep=waiting).release()
        assert waiting.seconds == LEASE_SECONDS
        assert "taken over from process 0 on an unknown host" in lines[-1]
        assert names(place) == ["other"]


def test_lease_is_taken_over_by_one_of_many(place, lines):
    dead_owner(place)
    leases, refused = [], []

    def start():
        try:
            leases.append(acquire(LeaseDirectory(place._path), Owner.this_process(), lines.append))
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(leases), len(refused)) == (1, 7)
    leases[0].verify()
    assert not leases[0].lost
    leases[0].release()
    assert names(place) == []


def dead_owner(place, job="", attempt=0):
    owner = dataclasses.replace(Owner.this_process(job, attempt), process_started=1)
    place.create(NAME, owner.to_json())
    return owner


def test_lease_taken_over_by_another_after_it_was_read_is_left_alone(place, lines, monkeypatch):
    """The other has taken over, and removed its guard, between this one's look and its guard."""
    dead_owner(place)
    other = Owner.this_process()
    create = place.create

    def create_late(name, text):
        if name == GUARD:
            (place._path / NAME).write_text(other.to_json())
        return create(name, text)

    monkeypatch.setattr(place, "create", create_late)
    with pytest.raises(ConfigError):
        acquire(place, Owner.this_process(), lines.append, sleep=Waiting())
    assert place.read(NAME)[0] == other.to_json()
    assert names(place) == [NAME]


def test_lease_with_a_guard_left_by_a_killed_process_is_taken_over(place, lines):
    dead_owner(place)
    place.create(GUARD, "")
    acquire(place, Owner.this_process(), lines.append, sleep=Waiting()).release()
    assert names(place) == []


def test_lease_removed_by_hand_is_made_again(place, objects, lines):
    for store in (place, objects):
        lease = acquire(store, Owner.this_process(), lines.append)
        store.remove(NAME)
        lease.verify()
        assert (store.read(NAME) is not None, lease.lost) == (True, "")
        lease.release()


@pytest.mark.parametrize("error", [PermissionError(), OSError(errno.EMFILE, "too many")])
def test_lease_of_a_process_that_cannot_be_seen_is_refused(place, lines, monkeypatch, error):
    dead_owner(place)
    owner = Owner.this_process()
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=error))
    with pytest.raises(ConfigError, match="is in use by"):
        acquire(place, owner, lines.append, sleep=pytest.fail)


def test_lease_of_a_lost_directory_is_lost(lines, tmp_path):
    for loss in ("moved", "moved and made again", "moved and replaced"):
        place = LeaseDirectory(tmp_path / loss / "run")
        place._path.parent.mkdir()
        lease = acquire(place, Owner.this_process(), lines.append)
        place._path.rename(tmp_path / loss / "moved")
        if loss == "moved and made again":
            place._path.mkdir()
        elif loss == "moved and replaced":
            place._path.write_text("a file")
        assert lease.lost == ""
        lease.verify()
        assert "run was deleted or moved" in lease.lost
        lease.release()


def test_lease_whose_store_fails_for_a_while_is_renewed_afterwards(place, lines, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    results = chain([OSError(5, "Input/output error")], repeat(DEFAULT))
    renewed, renew = threading.Event(), place.renew
    monkeypatch.setattr(place, "read", Mock(wraps=place.read, side_effect=results))
    monkeypatch.setattr(place, "renew", lambda *words: (renew(*words), renewed.set()))
    lease = acquire(place, Owner.this_process(), lines.append)
    os.utime(place._path / NAME, (0, 0))
    assert renewed.wait(60)
    assert os.stat(place._path / NAME).st_mtime > 0
    lease.release()


def test_lease_taken_over_is_lost_and_left_to_the_new_owner(place, lines):
    lease = acquire(place, Owner.this_process(), lines.append)
    (place._path / NAME).write_text(elsewhere().to_json())
    lease.verify()
    assert re.search(r"run was taken over by process \d+ on other", lease.lost)
    lease.release()
    assert names(place) == [NAME]


def test_lease_release_does_not_wait_for_a_store_that_hangs(place, lines, monkeypatch):
    monkeypatch.setattr(lease_module, "_RELEASE_SECONDS", 0.1)
    lease = acquire(place, Owner.this_process(), lines.append)
    ended = threading.Event()
    monkeypatch.setattr(place, "read", lambda name: ended.wait(60))
    began = time.monotonic()
    lease.release()
    assert time.monotonic() - began < 30
    ended.set()


@pytest.fixture(params=["s3", "gs"])
def objects(request):
    """A place in an object store.

    gcsfs needs an account; the file system in memory has the same interface and conditions.
    """
    if request.param == "gs":
        store = fsspec.filesystem("memory", skip_instance_cache=True)
        return LeaseObjects("memory://leases/runs/base", store, Deadline(30))
    request.getfixturevalue("s3").create_bucket(Bucket="leases")
    store = open_store("s3://", "checkpoint.mirror")
    return LeaseObjects("s3://leases/runs/base", store, Deadline(60))


def test_lease_in_an_object_store_is_refused_taken_over_and_released(objects, lines, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 3600)
    lease = acquire(objects, Owner.this_process(), lines.append)
    before = objects.read(NAME)[1]
    lease.verify()
    assert objects.read(NAME)[1] >= before
    with pytest.raises(ConfigError, match="://leases/runs/base is in use by process"):
        acquire(objects, Owner.this_process(), lines.append, sleep=pytest.fail)
    other = acquire(objects, elsewhere(), lines.append, sleep=Waiting())
    lease.verify()
    assert "was taken over by" in lease.lost
    lease.release()
    assert objects.read(NAME) is not None
    other.release()
    assert objects.read(NAME) is None
    # Both look before either has written; the store itself looks at a path without protocol.
    store = objects._store
    exists = store.exists
    monkeypatch.setattr(store, "exists", lambda path: "://" not in path and exists(path))
    assert [objects.create(NAME, text) for text in ("first", "second")] == [True, False]
    assert objects.read(NAME)[0] == "first"
    objects.remove(NAME)
    objects.remove(NAME)


def test_lease_in_a_store_that_ignores_the_condition_of_a_write_is_refused(
    objects, lines, monkeypatch
):
    store = objects._store
    write = store.pipe_file
    monkeypatch.setattr(store, "pipe_file", lambda path, data, mode="": write(path, data))
    lease = acquire(objects, Owner.this_process(), lines.append)
    with pytest.raises(ConfigError):
        acquire(objects, Owner.this_process(), lines.append, sleep=pytest.fail)
    lease.release()
