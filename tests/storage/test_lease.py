"""Leases of a directory: one owner at a time, and who may take over from whom. Without JAX."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from maxpipe.storage import lease as lease_module
from maxpipe.storage.lease import (
    LEASE_SECONDS,
    NAME,
    LeaseLost,
    Owner,
    PlaceInUse,
    acquire,
)
from maxpipe.storage.lease_places import LeaseDirectory, LeaseObjects
from maxpipe.storage.object_store import Deadline, open_store

HOLD = """
import sys, time
from pathlib import Path
from maxpipe.storage.lease import Owner, acquire
from maxpipe.storage.lease_places import LeaseDirectory
acquire(LeaseDirectory(Path(sys.argv[1])), Owner.this_process("job", 1), print)
print("owned", flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path):
    return LeaseDirectory(tmp_path / "run")


@pytest.fixture
def lines():
    return []


@pytest.fixture
def owner_process(tmp_path):
    """A live process that owns `place`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "owned\n"
        yield process
        process.kill()


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


def test_lease_of_a_live_process_is_refused_at_once(place, lines, owner_process):
    with pytest.raises(PlaceInUse) as caught:
        acquire(place, Owner.this_process(), lines.append, sleep=pytest.fail)
    assert f"is in use by process {owner_process.pid} on {os.uname().nodename} since 20" in str(
        caught.value
    )
    assert lines == []
    assert names(place) == [NAME]


def test_lease_of_a_killed_process_is_taken_over_at_once(place, lines, owner_process):
    owner_process.send_signal(signal.SIGKILL)
    owner_process.wait()
    acquire(place, Owner.this_process(), lines.append, sleep=pytest.fail).release()
    assert lines[0].endswith(", which has ended")
    assert names(place) == []


def test_lease_renewed_from_another_host_is_refused_after_a_look(place, lines, owner_process):
    waiting = Waiting(lambda: os.utime(place._path / NAME, (2**31, 2**31)))
    with pytest.raises(PlaceInUse):
        acquire(place, elsewhere(), lines.append, sleep=waiting)
    assert waiting.seconds == 1
    assert len(lines) == 1
    assert "waiting up to 30 s to see whether that process lives" in lines[0]


def test_lease_not_renewed_from_another_host_is_taken_over_after_the_lease(
    place, lines, owner_process
):
    owner_process.send_signal(signal.SIGKILL)
    waiting = Waiting()
    acquire(place, elsewhere(), lines.append, sleep=waiting).release()
    assert LEASE_SECONDS - 2 < waiting.seconds <= LEASE_SECONDS + 1
    assert "which has not renewed its lease for 30 s" in lines[1]


def test_lease_that_has_expired_is_taken_over_without_a_wait(place, lines):
    place.create(NAME, elsewhere().to_json())
    status = os.stat(place._path / NAME)
    os.utime(place._path / NAME, (status.st_atime, status.st_mtime - LEASE_SECONDS - 1))
    acquire(place, Owner.this_process(), lines.append, sleep=pytest.fail).release()
    assert len(lines) == 1


def test_lease_of_an_earlier_attempt_is_taken_over_at_once(place, lines, owner_process):
    owner_process.send_signal(signal.SIGKILL)
    acquire(place, elsewhere("job", 2), lines.append, sleep=pytest.fail).release()
    assert lines[0].endswith(", an earlier attempt of job job")


def test_lease_of_the_same_attempt_or_another_job_is_waited_for(place, lines):
    for owner, other in [
        (("job", 1), ("job", 1)),
        (("job", 1), ("another", 2)),
        (("job", 1), ("", 2)),
        (("", 0), ("", 1)),
    ]:
        place.create(NAME, Owner.this_process(*owner).to_json())
        waiting = Waiting()
        acquire(place, elsewhere(*other), lines.append, sleep=waiting).release()
        assert waiting.seconds > LEASE_SECONDS - 2, (owner, other)


def test_lease_of_a_live_earlier_attempt_on_this_machine_is_refused(place, lines, owner_process):
    with pytest.raises(PlaceInUse):
        acquire(place, Owner.this_process("job", 2), lines.append, sleep=pytest.fail)


def crafted(**fields):
    return dataclasses.replace(elsewhere("job", 1), **fields).to_json()


def test_lease_that_names_no_owner_expires(place, lines):
    for text in [
        "",
        "{",
        "[]",
        '{"start": "x"}',
        "[" * 100_000,
        crafted(start="../../x"),
        crafted(attempt="0"),
        crafted(pid=None),
    ]:
        place.create(NAME, text)
        waiting = Waiting()
        acquire(place, Owner.this_process("job", 2), lines.append, sleep=waiting).release()
        assert waiting.seconds > LEASE_SECONDS - 2


def test_lease_pipe_device_or_link_to_nothing_in_its_place_expires(place, lines):
    place.create("other", "")
    path = place._path / NAME
    for make in (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("nowhere"),
    ):
        make(path)
        os.utime(path, (0, 0), follow_symlinks=False)

        def own():
            acquire(place, Owner.this_process("job", 2), lines.append, sleep=Waiting()).release()

        Deadline(20).wait(own)  # reading it, or asking again, would never end
        assert "taken over from process 0 on an unknown host" in lines[-1]
        assert names(place) == ["other"]


def test_lease_is_taken_over_by_one_of_many(place, lines):
    dead_owner(place)
    leases, refused = [], []

    def start():
        try:
            leases.append(acquire(LeaseDirectory(place._path), Owner.this_process(), lines.append))
        except PlaceInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(leases), len(refused)) == (1, 7)
    leases[0].verify()
    leases[0].release()
    assert names(place) == []


def dead_owner(place):
    """Let a process of this machine that has ended own the place; return it."""
    owner = dataclasses.replace(Owner.this_process(), process_started=1)
    place.create(NAME, owner.to_json())
    return owner


def test_lease_taken_over_by_another_after_it_was_read_is_left_alone(place, lines, monkeypatch):
    """The other has taken over, and removed its guard, between this one's look and its guard."""
    guard = f"{NAME}.{dead_owner(place).start}"
    other = Owner.this_process()
    create = place.create

    def create_late(name, text):
        if name == guard:
            place.replace(NAME, other.to_json())
        return create(name, text)

    monkeypatch.setattr(place, "create", create_late)
    with pytest.raises(PlaceInUse):
        acquire(place, Owner.this_process(), lines.append, sleep=Waiting())
    assert place.read(NAME).text == other.to_json()
    assert names(place) == [NAME]


def test_lease_being_taken_over_is_not_taken_over_by_another(place, lines, monkeypatch):
    """The other looks after this one has compared the lease, and before it replaces it."""
    guard = f"{NAME}.{dead_owner(place).start}"
    read = place.read
    refused = []

    def read_and_be_late(name):
        entry = read(name)
        if read(guard) is not None and not refused:
            with pytest.raises(TimeoutError):
                acquire(LeaseDirectory(place._path), Owner.this_process(), lines.append, sleep=end)
            refused.append(entry)
        return entry

    def end(_):
        raise TimeoutError

    monkeypatch.setattr(place, "read", read_and_be_late)
    lease = acquire(place, Owner.this_process(), lines.append)
    assert len(refused) == 1
    lease.verify()
    lease.release()
    assert names(place) == []


def test_lease_with_a_guard_left_by_a_killed_process_is_taken_over(place, lines):
    guard = f"{NAME}.{dead_owner(place).start}"
    place.create(guard, "")
    os.utime(place._path / guard, (0, 0))
    acquire(place, Owner.this_process(), lines.append, sleep=Waiting()).release()
    assert names(place) == []


def test_lease_is_renewed_by_its_thread(place, lines, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    lease = acquire(place, Owner.this_process(), lines.append)
    renewed = threading.Event()
    renew = place.renew
    place.renew = lambda *words: (renew(*words), renewed.set())
    os.utime(place._path / NAME, (0, 0))
    assert renewed.wait(30)
    assert os.stat(place._path / NAME).st_mtime > 0
    lease.release()


def test_lease_removed_by_hand_is_made_again(place, lines):
    lease = acquire(place, Owner.this_process(), lines.append)
    (place._path / NAME).unlink()
    lease.verify()
    assert names(place) == [NAME]
    lease.release()


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
        lease.check()  # looks at nothing
        assert not lease.is_lost
        with pytest.raises(LeaseLost, match="run was deleted or moved while"):
            lease.verify()
        assert lease.is_lost
        with pytest.raises(LeaseLost):
            lease.check()
        lease.release()


def test_lease_whose_store_fails_for_a_while_is_renewed_afterwards(place, lines, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.01)
    failed, renewed = threading.Event(), threading.Event()
    read, renew = place.read, place.renew

    def read_or_fail(name):
        if failed.is_set():
            return read(name)
        failed.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(place, "renew", lambda *words: (renew(*words), renewed.set()))
    lease = acquire(place, Owner.this_process(), lines.append)
    renewed.clear()
    monkeypatch.setattr(place, "read", read_or_fail)
    assert failed.wait(60)
    assert renewed.wait(60)
    failed.clear()
    lease.verify()  # one that fails proves nothing
    lease.release()


def test_lease_taken_over_is_lost_and_left_to_the_new_owner(place, lines):
    lease = acquire(place, Owner.this_process(), lines.append)
    place.replace(NAME, elsewhere().to_json())
    with pytest.raises(LeaseLost, match=r"run was taken over by process \d+ on other"):
        lease.verify()
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


def test_lease_without_hard_links_is_created_all_the_same(place, lines, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    acquire(place, Owner.this_process(), lines.append)
    with pytest.raises(PlaceInUse):
        acquire(LeaseDirectory(place._path), Owner.this_process(), lines.append)


def test_lease_in_an_object_store_is_refused_taken_over_and_released(s3, lines, monkeypatch):
    s3.create_bucket(Bucket="leases")
    store = open_store("s3://", "checkpoint.mirror")
    place = LeaseObjects("s3://leases/runs/base", store, Deadline(60))
    assert_refused_taken_over_and_released(place, lines, monkeypatch)
    assert "Contents" not in s3.list_objects_v2(Bucket="leases")
    # Both look before either has written.
    monkeypatch.setattr(store, "exists", lambda path: False)
    assert [place.create(NAME, text) for text in ("first", "second")] == [True, False]
    assert place.read(NAME).text == "first"


def assert_refused_taken_over_and_released(place, lines, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 3600)
    lease = acquire(place, Owner.this_process(), lines.append)
    lease.verify()
    with pytest.raises(PlaceInUse, match="://leases/runs/base is in use by process"):
        acquire(place, Owner.this_process(), lines.append, sleep=pytest.fail)
    other = acquire(place, elsewhere(), lines.append, sleep=Waiting())
    with pytest.raises(LeaseLost, match="was taken over by"):
        lease.verify()
    lease.release()
    assert place.read(NAME) is not None
    other.release()
    assert place.read(NAME) is None


def test_lease_in_a_store_like_google_is_refused_taken_over_and_released(lines, monkeypatch):
    """gcsfs needs an account; the file system in memory has the same interface and conditions."""
    store = fsspec.filesystem("memory", skip_instance_cache=True)
    place = LeaseObjects("memory://leases/runs/base", store, Deadline(30))
    assert_refused_taken_over_and_released(place, lines, monkeypatch)
    lease = acquire(place, Owner.this_process(), lines.append)
    before = place.read(NAME)
    lease.verify()
    assert place.read(NAME).changed > before.changed
    lease.release()
    assert store.find("/leases") == []
    # Both look before either writes; the store itself looks at a path without protocol.
    exists = store.exists
    monkeypatch.setattr(store, "exists", lambda path: "://" not in path and exists(path))
    assert [place.create(NAME, text) for text in ("first", "second")] == [True, False]
    assert place.read(NAME).text == "first"
    place.remove(NAME)
    place.remove(NAME)


def test_lease_in_an_object_store_that_ignores_conditions_is_refused(s3, lines, monkeypatch):
    s3.create_bucket(Bucket="unconditional")
    store = open_store("s3://", "checkpoint.mirror")
    write = store.pipe_file
    monkeypatch.setattr(store, "pipe_file", lambda path, data, mode="": write(path, data))
    place = LeaseObjects("s3://unconditional/base", store, Deadline(60))
    lease = acquire(place, Owner.this_process(), lines.append)
    with pytest.raises(PlaceInUse):
        acquire(place, Owner.this_process(), lines.append, sleep=pytest.fail)
    lease.release()
