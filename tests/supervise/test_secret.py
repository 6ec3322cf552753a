"""Where supervisors find the secret of their run, who proves it, and who is turned away."""

import contextlib
import os
import random
import socket
import threading
import time

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.supervise import secret as secret_module
from maxpipe.supervise.secret import CALLER, LISTENER, SECRET, listening, prove, run_secret


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SECRET, raising=False)
    (tmp_path / "c.yml").write_text("base: base\noutput_dir: shared\nmodel.embed_dim: wrong\n")
    return tmp_path


def train(*words):
    return ["python", "-m", "maxpipe.train", "--import", "own", *words]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (train("c.yml"), "shared"),
        (train("c.yml", "output_dir=a", "optimizer.name=own", "output_dir=~/b"), "home/b"),
        (train("c.yml", "run_name=x", "output_dir=x/${run_name}"), "x/x"),
        (["maxpipe", "train", "base"], "runs"),
        (train("base", "output_dir=gs://bucket/runs"), "home/.cache/maxpipe"),
        (["sh", "train.sh"], "home/.cache/maxpipe"),
    ],
)
def test_run_secret_is_in_the_output_dir_for_its_owner_alone(here, command, place):
    secret = run_secret(command, 2)
    (file,) = (here / place).iterdir()
    assert not (here / "gs:").exists()
    assert file.name == f".supervisors-{os.geteuid()}"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == secret
    assert len(secret) == 64


def test_run_secret_is_the_same_for_supervisors_that_begin_together(here):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(run_secret(train("c.yml"), 8)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({*found}) == 1


def test_run_secret_of_the_environment_is_taken_before_any_file_and_from_the_trainer(
    here, monkeypatch
):
    monkeypatch.setenv(SECRET, "word")
    assert run_secret(train("c.yml"), 2) == "word"
    assert SECRET not in os.environ
    assert run_secret(train("c.yml"), 1) != run_secret(train("c.yml"), 1)
    assert not (here / "shared").exists()


@pytest.mark.parametrize(
    "spoil", [lambda file: file.chmod(0o644), lambda file: file.write_text("")]
)
def test_run_secret_that_others_may_know_is_refused_with_the_remedy(here, spoil):
    run_secret(train("c.yml"), 2)
    (file,) = (here / "shared").iterdir()
    spoil(file)
    with pytest.raises(ConfigError, match=r"no secret .*; set MAXPIPE_SECRET to the same random"):
        run_secret(train("c.yml"), 2)


@pytest.fixture
def ends():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(end) for end in socket.socketpair()]


def outcome(connection, secret, side):
    with contextlib.suppress(ConnectionError), connection:
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
    monkeypatch.setattr(secret_module, "_PROOF_SECONDS", 0.5)

    def echo():
        with contextlib.suppress(OSError):
            while heard := ends[1].recv(100):
                ends[1].sendall(heard)

    thread = threading.Thread(target=echo)
    thread.start()
    assert outcome(ends[0], "secret", side) == "refused"
    thread.join()


def test_listener_passes_on_no_stranger_and_does_not_keep_others_waiting(monkeypatch):
    monkeypatch.setattr(secret_module, "_PROOF_SECONDS", 60.0)
    passed = []

    def take(connection, secret):
        passed.append(secret)
        connection.close()

    with listening("localhost", 0, lambda: "secret", take) as port, contextlib.ExitStack() as stack:
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"Stopping {}\n", random.randbytes(100)):
            stranger = stack.enter_context(socket.create_connection(("localhost", port)))
            stranger.sendall(words)
        began = time.monotonic()
        with socket.create_connection(("localhost", port)) as caller:
            prove(caller, "secret", CALLER)
        assert time.monotonic() - began < 30
        time.sleep(0.3)
        assert passed == ["secret"]


def test_listener_without_a_secret_refuses_everyone():
    with listening("localhost", 0, lambda: "", lambda connection, _: None) as port:
        caller = socket.create_connection(("localhost", port))
        assert outcome(caller, "", CALLER) == "refused"
