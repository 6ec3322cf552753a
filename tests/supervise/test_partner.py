"""Copies of one memory in another one, over connections of this machine."""

import errno
import json
import shutil
import socket
import threading
import time
from dataclasses import replace

import pytest

from maxpipe.checkpoint.steps import COPIED, OWN, PARTNER
from maxpipe.supervise import partner
from maxpipe.supervise.partner import Partners, Source, copy_new_steps, names_in
from maxpipe.supervise.secret import CALLER, Unproved, prove

RUN = "0123abcd"


def write(part, *steps):
    for step in steps:
        (part / RUN / str(step) / "meta").mkdir(parents=True)
        (part / RUN / str(step) / "meta" / "metadata").write_text(f"record of {step}")
        (part / RUN / str(step) / "data").write_bytes(bytes([step]) * 3_000_000)


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
    memory = tmp_path / "served"
    memory.mkdir()
    with Partners(memory, 0) as partners:
        partners._word = "word"
        yield memory, Source(partners.listen("localhost"), "word", OWN)


def test_copy_new_steps_brings_all_files_and_removes_what_the_source_removed(served, tmp_path):
    memory, source = served
    target = tmp_path / "copy"
    write(memory / OWN, 10, 20)
    copy_new_steps(source, target)
    assert steps_in(target) == [10, 20]
    assert all(is_whole(target, step) for step in (10, 20))
    shutil.rmtree(memory / OWN / RUN / "10")
    write(memory / OWN, 30)
    copy_new_steps(source, target)
    assert steps_in(target) == [20, 30]
    assert json.loads((memory / COPIED).read_text()) == [f"{RUN}/10", f"{RUN}/20"]


def test_copy_new_steps_from_an_empty_source_keeps_what_is_there(served, tmp_path):
    write(tmp_path / "copy", 10)
    copy_new_steps(served[1], tmp_path / "copy")
    assert steps_in(tmp_path / "copy") == [10]


def test_copy_new_steps_that_is_cut_short_leaves_no_step(served, tmp_path, monkeypatch):
    memory, source = served
    write(memory / OWN, 10)
    copy = partner._copy

    def cut(origin, target, size, closed):
        copy(origin, target, min(size, 1000), closed)
        if size > 1000:
            raise OSError("connection reset")

    monkeypatch.setattr(partner, "_copy", cut)
    with pytest.raises(partner.ERRORS):
        copy_new_steps(source, tmp_path / "copy")
    assert steps_in(tmp_path / "copy") == []
    monkeypatch.setattr(partner, "_copy", copy)
    copy_new_steps(source, tmp_path / "copy")
    assert is_whole(tmp_path / "copy", 10)


@pytest.mark.parametrize("request_", [{"part": "..", "held": []}, {"part": OWN}, []])
def test_partners_answer_strange_requests_with_nothing(served, request_):
    memory, source = served
    write(memory / OWN, 10)
    with socket.create_connection(("localhost", int(source.address.rpartition(":")[2]))) as line:
        prove(line, "word", CALLER)
        line.sendall(json.dumps(request_).encode() + b"\n")
        assert line.makefile("rb").read() == b""


def test_partners_are_closed_to_another_word(served):
    with pytest.raises(Unproved):
        copy_new_steps(replace(served[1], word="other"), served[0] / PARTNER)


@pytest.fixture
def answering(monkeypatch):
    """A function that returns a source whose supervisor gives one answer, whatever it is asked."""
    with socket.create_server(("localhost", 0)) as listener:
        source = Source(f"localhost:{listener.getsockname()[1]}", "word", OWN)
        with socket.create_connection(listener.getsockname()) as connection:
            hostile_side = listener.accept()[0]
            monkeypatch.setattr(socket, "create_connection", lambda *_, **__: connection)
            monkeypatch.setattr(partner, "prove", lambda *_: None)

            def answer(text):
                hostile_side.sendall(text)
                return source

            with hostile_side:
                yield answer


@pytest.mark.parametrize(
    "text",
    [
        *(f'{{"{RUN}/10": {files}}}\n' for files in ('{"../outside": 1}', "[1]", "null", "{")),
        *(f'{{"{RUN}/10": {files}}}\n' for files in ('{"data": "1"}', "[" * 100_000, "")),
        *("1\n", "[[\n", "\n"),
    ],
)
def test_answer_that_names_no_files_of_a_step_raises_what_is_expected(answering, tmp_path, text):
    with pytest.raises(partner.ERRORS):
        copy_new_steps(answering(text.encode()), tmp_path / "part")
    assert not names_in(tmp_path / "part")
    assert not [*tmp_path.rglob("outside")]


class Host:
    """Partners of one supervisor among several, with a memory of its own."""

    def __init__(self, memory, index):
        self.memory, self.index = memory, index
        (memory / OWN).mkdir(parents=True)
        self.partners = Partners(memory, index)

    def begin(self, hosts, **more):
        addresses = {host.index: host.partners.listen("localhost") for host in hosts}
        return self.partners.begin(addresses, f"word {[*addresses]}", **more)

    def lose(self):
        self.partners.__exit__()
        self.memory.rename(self.memory.with_name("lost"))


def begin_together(hosts):
    """Begin an attempt of these hosts; one that began alone would wait for the others."""
    for ready in [host.begin(hosts) for host in hosts]:
        assert ready.wait(60)


@pytest.fixture
def hosts(tmp_path):
    hosts = [Host(tmp_path / f"host{index}", index) for index in range(3)]
    begin_together(hosts)
    yield hosts
    for host in hosts:
        host.partners.__exit__()


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
    own, seen, receive = hosts[lost].memory / OWN, [], partner._receive

    def look_and_receive(*words):
        seen.append(steps_in(own))
        receive(*words)

    monkeypatch.setattr(partner, "_receive", look_and_receive)
    begin_together(hosts)
    assert steps_in(own) == [10, 20]
    assert is_whole(own, 20)
    assert seen[:2] == [[], []], "who follows sees both or none"


def test_partners_that_cannot_fetch_all_begin_with_what_has_come(hosts, tmp_path, monkeypatch):
    write(hosts[0].memory / OWN, 10, 20)
    until(lambda: steps_in(hosts[1].memory / PARTNER) == [10, 20])
    hosts[0].lose()
    hosts[0], receive = Host(tmp_path / "new", 0), partner._receive

    def fail(answer, files, step, ended):
        if "20" in step.name:
            raise OSError("no room")
        receive(answer, files, step, ended)

    monkeypatch.setattr(partner, "_receive", fail)
    monkeypatch.setattr(partner, "_REACH_SECONDS", 1.0)
    begin_together(hosts)
    assert steps_in(hosts[0].memory / OWN) == [10]
    assert not (hosts[0].memory / "fetched").exists()


def test_partners_with_steps_of_their_own_fetch_nothing(hosts):
    write(hosts[0].memory / OWN, 10)
    until(lambda: steps_in(hosts[1].memory / PARTNER) == [10])
    shutil.rmtree(hosts[0].memory / OWN / RUN / "10")
    write(hosts[0].memory / OWN, 20)
    hosts[0].begin(hosts).wait(60)
    assert steps_in(hosts[0].memory / OWN) == [20]


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
    receive = partner._receive

    def late(answer, files, step, ended):
        if step.is_relative_to(hosts[1].memory):
            copied.set()
            goes_on.wait(30)
        receive(answer, files, step, ended)

    monkeypatch.setattr(partner, "_receive", late)
    write(hosts[0].memory / OWN, 10)
    assert copied.wait(30)
    monkeypatch.setattr(partner, "_remove", lambda part, names: None)  # what has a name stays
    ready = hosts[1].begin([hosts[1]])
    assert not ready.wait(0.2), "the next attempt waits until this one's copy has ended"
    goes_on.set()
    assert ready.wait(30)
    assert [*(hosts[1].memory / PARTNER).glob("*/*")] == []


def test_partners_serve_nobody_until_what_is_not_the_attempt_s_has_been_removed(hosts, monkeypatch):
    write(hosts[0].memory / OWN, 10)
    until(lambda: steps_in(hosts[1].memory / PARTNER) == [10])
    seen = []
    remove = partner._remove

    def look_and_remove(part, names):
        seen.append(hosts[1].partners._word)
        remove(part, names)

    monkeypatch.setattr(partner, "_remove", look_and_remove)
    hosts[1].begin([hosts[1]]).wait(60)
    assert seen == [None]


def test_partners_whose_memory_was_made_again_say_that_no_step_is_copied(hosts):
    hosts[0].partners.rest()
    hosts[0].partners._thread.join()
    shutil.rmtree(hosts[0].memory)
    hosts[0].memory.mkdir()
    hosts[0].begin([hosts[0]]).wait(60)
    assert (hosts[0].memory / COPIED).read_text() == "[]"


def test_partners_without_room_in_memory_begin_alone(tmp_path, monkeypatch):
    def fail(path, pieces):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(partner, "write_atomically", fail)
    host = Host(tmp_path / "full", 0)
    assert host.partners.begin({0: "localhost:1", 1: "localhost:1"}, "word").wait(30)
    assert host.partners._word is None
    host.partners.__exit__()
