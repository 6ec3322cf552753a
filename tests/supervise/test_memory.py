"""Replicas in memory: directories of supervisors, and copies over connections of this machine."""

import contextlib
import json
import shutil
import tempfile
import threading
import time

import pytest

from maxpipe.checkpoint.steps import COPIED, OWN, PARTNER
from maxpipe.supervise import memory
from maxpipe.supervise.memory import Partners, copy_new_steps, hold, names_in, shared_memory


@pytest.fixture
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
        for file in shared.iterdir():  # as systemd's RemoveIPC does
            file.unlink() if file.is_file() else shutil.rmtree(file)
    assert [*shared.iterdir()] == []


def test_shared_memory_that_has_no_room_is_on_disk(shared, monkeypatch):
    monkeypatch.setattr(memory, "_SHARED", shared / "nothing")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with shared_memory() as here:
        assert here.parent == shared
    assert [*shared.iterdir()] == []


def test_shared_memory_removes_what_killed_owners_have_left_and_nothing_else(shared):
    for name in ("killed", "of-another-program"):
        (shared / f"maxpipe-replicas-{name}" / "run").mkdir(parents=True)
    (shared / "maxpipe-replicas-killed.lock").touch()  # its lock ended, in whatever container
    with shared_memory():
        names = {path.name for path in shared.iterdir()}
    assert "maxpipe-replicas-of-another-program" in names
    assert not any(name.startswith("maxpipe-replicas-killed") for name in names)


RUN = "0123abcd"


def write(part, *steps):
    for step in steps:
        scratch = part / RUN / f"{step}.unfinished"
        (scratch / "meta").mkdir(parents=True)
        (scratch / "meta" / "metadata").write_text(f"record of {step}")
        (scratch / "data").write_bytes(bytes([step]) * 3_000_000)
        scratch.rename(part / RUN / str(step))


def steps_in(part):
    return sorted(int(name.rpartition("/")[2]) for name in names_in(part))


def is_whole(part, step):
    directory = part / RUN / str(step)
    record = (directory / "meta" / "metadata").read_text()
    return record == f"record of {step}" and directory.joinpath("data").stat().st_size == 3_000_000


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def served(tmp_path):
    """A memory, and a function that copies its steps to a directory."""
    directory = tmp_path / "served"
    directory.mkdir()
    partners = Partners(directory, 0)
    with partners.serving("localhost") as port:
        partners._word = "word"

        def copy_to(target, word="word", part=OWN):
            copy_new_steps(f"localhost:{port}", word, part, target, threading.Event())

        yield directory, copy_to


def test_copy_new_steps_brings_all_files_and_removes_what_the_source_removed(served, tmp_path):
    source, copy_to = served
    target = tmp_path / "copy"
    write(target, 5)
    copy_to(target)
    assert steps_in(target) == [5], "a source without steps changes nothing"
    write(source / OWN, 10, 20)
    copy_to(target)
    assert steps_in(target) == [10, 20]
    assert all(is_whole(target, step) for step in (10, 20))
    shutil.rmtree(source / OWN / RUN / "10")
    write(source / OWN, 30)
    copy_to(target)
    assert steps_in(target) == [20, 30]
    assert json.loads((source / COPIED).read_text()) == [f"{RUN}/10", f"{RUN}/20"]


@pytest.mark.parametrize(("word", "part"), [("other", OWN), ("word", "..")])
def test_partners_answer_no_other_word_and_no_other_part(served, tmp_path, word, part):
    source, copy_to = served
    write(source / OWN, 10)
    with pytest.raises(memory.ERRORS):
        copy_to(tmp_path / "copy", word, part)
    assert not (tmp_path / "copy").exists()


class Host:
    """Partners of one supervisor among several, with a memory of its own."""

    def __init__(self, directory, index):
        self.memory, self.index = directory, index
        (directory / OWN).mkdir(parents=True)
        self.partners, self.stack = Partners(directory, index), contextlib.ExitStack()
        self.address = f"localhost:{self.stack.enter_context(self.partners.serving('localhost'))}"

    def begin(self, hosts, **more):
        addresses = {host.index: host.address for host in hosts}
        return self.partners.begin(addresses, f"word {[*addresses]}", **more)

    def lose(self):
        self.stack.close()
        self.memory.rename(self.memory.with_name("lost"))


def begin_together(hosts):
    for ready in [host.begin(hosts) for host in hosts]:
        assert ready.wait(60)


@pytest.fixture
def hosts(tmp_path):
    hosts = [Host(tmp_path / f"host{index}", index) for index in range(3)]
    begin_together(hosts)
    yield hosts
    for host in hosts:
        host.stack.close()


def test_partners_each_hold_the_steps_of_the_host_before(hosts):
    for number, host in enumerate(hosts, 1):
        write(host.memory / OWN, 10 * number)
    for before, host in zip((2, 0, 1), hosts, strict=True):
        until(lambda h=host, b=before: steps_in(h.memory / PARTNER) == [10 * (b + 1)])
    for number, host in enumerate(hosts, 1):
        names = [f"{RUN}/{10 * number}"]
        until(lambda h=host, n=names: json.loads((h.memory / COPIED).read_text()) == n)


@pytest.mark.parametrize("lost", [0, 1])
def test_partners_of_a_new_host_fetch_what_the_lost_one_had(hosts, tmp_path, lost, monkeypatch):
    write(hosts[lost].memory / OWN, 10, 20)
    until(lambda: steps_in(hosts[(lost + 1) % 3].memory / PARTNER) == [10, 20])
    hosts[lost].lose()
    hosts[lost] = Host(tmp_path / "new", lost)
    own, seen, receive = hosts[lost].memory / OWN, [], memory._receive

    def look_and_receive(*words):
        seen.append(steps_in(own))
        receive(*words)

    monkeypatch.setattr(memory, "_receive", look_and_receive)
    begin_together(hosts)
    assert steps_in(own) == [10, 20]
    assert is_whole(own, 20)
    assert seen[:2] == [[], []], "who follows sees both or none"


def test_partners_of_fewer_hosts_follow_the_one_before_among_them(hosts):
    for number, host in enumerate(hosts, 1):
        write(host.memory / OWN, 10 * number)
    until(lambda: steps_in(hosts[2].memory / PARTNER) == [20])
    hosts[1].lose()
    begin_together([hosts[0], hosts[2]])
    until(lambda: steps_in(hosts[2].memory / PARTNER) == [10])
    until(lambda: json.loads((hosts[0].memory / COPIED).read_text()) == [f"{RUN}/10"])


def test_partner_left_alone_waits_for_no_copy_and_gives_away_nothing_of_the_lost(hosts):
    write(hosts[1].memory / OWN, 10)
    write(hosts[2].memory / OWN, 10)
    until(lambda: json.loads((hosts[1].memory / COPIED).read_text()) == [f"{RUN}/10"])
    until(lambda: steps_in(hosts[0].memory / PARTNER) == [10])
    hosts[0].begin([hosts[0]]).wait(60)
    assert steps_in(hosts[0].memory / PARTNER) == []
    hosts[1].begin([hosts[1]]).wait(60)
    assert json.loads((hosts[1].memory / COPIED).read_text()) == []
    assert steps_in(hosts[1].memory / OWN) == [10]


def test_partners_of_another_history_forget_their_steps_and_copies(hosts):
    for host in hosts:
        write(host.memory / OWN, 10)
    until(lambda: steps_in(hosts[2].memory / PARTNER) == [10])
    until(lambda: (hosts[2].memory / COPIED).read_text() == f'["{RUN}/10"]')
    for host in hosts:
        host.partners.rest()
    hosts[2].begin([hosts[2]], forgets=True).wait(60)
    assert steps_in(hosts[2].memory / OWN) == steps_in(hosts[2].memory / PARTNER) == []
    assert (hosts[2].memory / COPIED).read_text() == "[]"


def test_partners_fetch_steps_of_the_common_history_in_place_of_their_own(hosts):
    write(hosts[0].memory / OWN, 10)
    until(lambda: steps_in(hosts[1].memory / PARTNER) == [10])
    hosts[0].partners.rest()
    shutil.rmtree(hosts[0].memory / OWN / RUN / "10")
    write(hosts[0].memory / OWN, 20)
    hosts[0].begin(hosts, forgets=True).wait(60)
    assert steps_in(hosts[0].memory / OWN) == [10]


def test_partner_s_copy_that_is_under_way_when_the_next_attempt_begins_gets_no_name(
    hosts, monkeypatch
):
    copied, goes_on = threading.Event(), threading.Event()
    receive = memory._receive

    def late(answer, files, step, ended):
        if step.is_relative_to(hosts[1].memory):
            copied.set()
            goes_on.wait(30)
        receive(answer, files, step, ended)

    monkeypatch.setattr(memory, "_receive", late)
    write(hosts[0].memory / OWN, 10)
    assert copied.wait(30)
    monkeypatch.setattr(memory, "_remove", lambda part, names: None)  # what has a name stays
    ready = hosts[1].begin([hosts[1]])
    assert not ready.wait(0.2), "the next attempt waits until this one's copy has ended"
    goes_on.set()
    assert ready.wait(30)
    assert [*(hosts[1].memory / PARTNER).glob("*/*")] == []
