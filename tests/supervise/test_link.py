"""Lines between supervisors: who is heard, who is refused, and what cannot silence a council."""

import contextlib
import select
import socket

import pytest

from maxpipe.devices.cluster import Sizes
from maxpipe.supervise import link
from maxpipe.supervise.council import (
    Council,
    End,
    Ended,
    Finish,
    Joined,
    Policy,
    Save,
    Start,
    Stopping,
)
from maxpipe.supervise.link import Hub, decode, encode
from maxpipe.supervise.process import Progress
from maxpipe.supervise.secret import CALLER, prove

SECRET = "of this run"


@pytest.mark.parametrize(
    "message",
    [
        Joined(2, "a", "a:1", 3, 1, Sizes((1, 2), 60.0, "{}")),
        Ended(1, -9),
        Stopping(15),
        Start(3, 7, "j", (0, 2), ("a:1", "b:2"), "word", "{}", 2),
        Save(),
        End(2.0, "process 0 ended by SIGKILL"),
    ],
)
def test_message_decoded_is_what_was_encoded(message):
    decoded = decode(encode(message))
    assert (type(decoded), decoded) == (type(message), message)


class Member:
    def __init__(self, port, number, host="localhost", count=2):
        self.socket = socket.create_connection((host, port))
        prove(self.socket, SECRET, CALLER)
        self.socket.settimeout(20)
        self.file = self.socket.makefile()
        self.say(encode(Joined(count, f"host{number}", member=number)))

    def say(self, *texts):
        self.socket.sendall("".join(text + "\n" for text in texts).encode())

    def hear(self):
        while not (text := self.file.readline().strip()):
            pass
        return decode(text)

    def has_order(self, seconds=0.5):
        return bool(select.select([self.socket], [], [], seconds)[0])

    def close(self):
        self.file.close()
        self.socket.close()


@pytest.fixture
def council():
    return Council(2, Policy(), "job", Progress, lambda text: None)


@pytest.fixture
def hub(council, monkeypatch):
    monkeypatch.setattr(link, "_FAREWELL_SECONDS", 0.1)
    with Hub(council).serving("localhost", 0, SECRET) as port:
        yield port


@pytest.fixture
def join(hub):
    with contextlib.ExitStack() as stack:

        def join(number, **more):
            return stack.enter_context(contextlib.closing(Member(hub, number, **more)))

        yield join


def test_hub_refuses_a_second_supervisor_of_a_number_alone_once_the_first_is_heard(
    join, council, monkeypatch
):
    monkeypatch.setattr(link, "_SURE_SECONDS", 0.0)
    members = [join(0), join(1)]
    assert {type(member.hear()) for member in members} == {Start}
    assert join(1).file.read() == "", "it may be the first one, which has come back"
    members[1].say("")
    while not (text := (second := join(1)).file.readline()):
        pass
    refusal = decode(text)
    assert refusal.code == 2
    assert refusal.why.startswith("process 1 on host1 has a supervisor already")
    second.say("", encode(Ended(council.status.attempt, 42)))
    second.close()
    assert not members[0].has_order()
    assert council.status.members == {0: "host0", 1: "host1"}


def test_hub_seats_a_supervisor_that_comes_back_when_its_earlier_line_is_lost(join, council):
    members = [join(0), join(1)]
    assert {type(member.hear()) for member in members} == {Start}
    attempt = council.status.attempt
    for _ in range(2):
        assert join(1).file.read() == "", "it comes again until the first one is found lost"
    members[1].close()
    assert members[0].hear().seconds == 2.0
    members[0].say(encode(Ended(attempt, 134)))
    again = join(1)
    while type(start := again.hear()) is End:
        pass  # which does not apply to it
    assert start == members[0].hear()
    assert start.attempt > attempt


def test_hub_ignores_who_reports_before_it_has_greeted(join, hub, council):
    members = [join(0), join(1)]
    assert {type(member.hear()) for member in members} == {Start}
    for report in (Stopping(15), Ended(council.status.attempt, 1)):
        with socket.create_connection(("localhost", hub)) as early:
            prove(early, SECRET, CALLER)
            early.sendall(f"{encode(report)}\n".encode())
            assert not members[0].has_order()


def test_hub_that_has_no_order_shows_that_it_is_there(join, monkeypatch):
    monkeypatch.setattr(link, "PING_SECONDS", 0.1)
    assert join(0).file.readline() == "\n"


def test_hub_whose_council_raises_lets_all_supervisors_end_with_1(
    join, council, monkeypatch, capfd
):
    members = [join(0), join(1)]
    assert {type(member.hear()) for member in members} == {Start}

    def fail(member, report):
        raise BrokenPipeError("unforeseen")

    monkeypatch.setattr(council, "receive", fail)
    members[1].say(encode(Ended(council.status.attempt, 75)))
    why = "the council has failed: BrokenPipeError('unforeseen')"
    assert [member.hear() for member in members] == [Finish(1, why)] * 2
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("::1", "::1"),
        ("of-nobody.invalid", "::1"),  # as behind a proxy
        ("192.0.2.1", "127.0.0.1"),
    ],
)
def test_hub_at_a_port_is_reached_by_both_kinds_of_addresses(council, host, caller):
    family = socket.AF_INET6 if ":" in caller else socket.AF_INET
    try:
        with socket.create_server((caller, 0), family=family) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no {caller}")
    with Hub(council).serving(host, port, SECRET):
        members = [Member(port, number, caller) for number in (0, 1)]
        assert {type(member.hear()) for member in members} == {Start}
        for member in members:
            member.close()
