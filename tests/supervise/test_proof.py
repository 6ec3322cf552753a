"""Who proves the secret of a run, and who is turned away."""

import contextlib
import random
import socket
import threading
import time

import pytest

from maxpipe.supervise import proof
from maxpipe.supervise.proof import CALLER, LISTENER, Listener, Unproved, prove


@pytest.fixture
def ends():
    """Return both ends of a connection."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(end) for end in socket.socketpair()]


def outcome(connection, secret, side):
    with contextlib.suppress(Unproved), connection:
        prove(connection, secret, side)
        return "proved"
    return "refused"


@pytest.mark.parametrize(("other", "expected"), [("a", "proved"), ("b", "refused")])
def test_prove_of_one_secret_alone_is_believed_at_both_ends(ends, other, expected):
    outcomes = []

    def listen():
        outcomes.append(outcome(ends[1], other, LISTENER))

    thread = threading.Thread(target=listen)
    thread.start()
    outcomes.append(outcome(ends[0], "a", CALLER))
    thread.join()
    assert outcomes == [expected] * 2


@pytest.mark.parametrize("side", [CALLER, LISTENER])
def test_prove_to_one_s_own_words_is_refused(ends, side, monkeypatch):
    monkeypatch.setattr(proof, "_PROOF_SECONDS", 0.5)

    def echo():
        with contextlib.suppress(OSError):
            while heard := ends[1].recv(100):
                ends[1].sendall(heard)

    thread = threading.Thread(target=echo)
    thread.start()
    assert outcome(ends[0], "secret", side) == "refused"
    thread.join()


def test_listener_proves_nothing_to_a_stranger(ends):
    thread = threading.Thread(target=outcome, args=(ends[0], "secret", LISTENER))
    thread.start()
    ends[1].sendall(b"0" * 128)
    ends[1].settimeout(20)
    heard = b""
    while piece := ends[1].recv(1000):
        heard += piece
    thread.join()
    assert len(heard) == 64, "it has sent more than a random number"


def strangers():
    """Return what strangers say: other protocols, other messages, random bytes."""
    draw = random.Random(46)
    return [
        *(b"", b"\n", b"0\n", b"77\n", b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\xff" * 64),
        b'77\n{"kind": "Sizes", "counts": "1", "wait_seconds": 0.0, "whole": "x"}\n',
        b'Joined {"count": 2, "host": "x"}\nStopping {"number": 15}\n',
        b'Sizes {"counts": "1", "wait_seconds": 0.0, "whole": "x"}\n',
        b"9" * 4300 + b"\n",
        b"[" * 100_000,
        *(draw.randbytes(draw.randrange(300)) for _ in range(12)),
    ]


def test_listener_passes_on_no_stranger_and_does_not_keep_others_waiting(monkeypatch):
    monkeypatch.setattr(proof, "_PROOF_SECONDS", 60.0)
    passed = []

    def take(connection, secret):
        passed.append(secret)
        connection.close()

    with Listener("localhost", 0, lambda: "secret", take) as listener, contextlib.ExitStack() as s:
        address = listener.own_host, listener.port
        for words in strangers():
            stranger = s.enter_context(socket.create_connection(address))
            with contextlib.suppress(OSError):
                stranger.sendall(words)
        began = time.monotonic()
        with socket.create_connection(address) as caller:
            prove(caller, "secret", CALLER)
        assert time.monotonic() - began < 30
        time.sleep(0.3)
        assert passed == ["secret"]


def test_listener_is_reached_by_its_address_only():
    with Listener("127.0.0.1", 0, lambda: "secret", lambda connection, _: None) as listener:
        assert listener.own_host == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", listener.port), 5)


def test_listener_without_a_secret_refuses_everyone():
    with Listener("127.0.0.1", 0, lambda: None, lambda connection, _: None) as listener:
        caller = socket.create_connection(("127.0.0.1", listener.port))
        assert outcome(caller, "None", CALLER) == "refused"
