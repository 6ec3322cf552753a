"""How a process ends after an error, alone and as one of several."""

import json
import threading

import jax
import pytest

from maxpipe.checkpoint.errors import CheckpointSaveError, CheckpointUnreadable
from maxpipe.config import ConfigError, Problem
from maxpipe.devices import processes
from maxpipe.storage.lease import LeaseLost
from maxpipe.supervision import failure
from maxpipe.supervision.failure import failing_fast


class Left(BaseException):
    """Stands for the end of the process."""


class Store:
    """The coordination service's store of one of two processes; records what happens in turn."""

    def __init__(self):
        self.posted = {}
        self.events = []

    def key_value_set(self, key, value, allow_overwrite=False):
        self.posted[key] = value
        self.events.append("post")

    def key_value_try_get(self, key):
        if key not in self.posted:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.posted[key]

    def wait_at_barrier(self, key, timeout):
        self.events.append("barrier")


@pytest.fixture
def store(monkeypatch):
    store = Store()

    def leave(code):
        store.events.append(code)
        raise Left

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(failure, "coordinator", lambda: store)
    monkeypatch.setattr(failure, "leave", leave)
    monkeypatch.setattr(failure, "_POLL_SECONDS", 0.01)
    return store


def test_an_explained_error_ends_with_1_and_one_line(capsys):
    with pytest.raises(SystemExit) as end, failing_fast():
        raise CheckpointUnreadable("a newer version wrote it")
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: a newer version wrote it\n"


def test_an_explained_error_in_a_program_is_the_programs(capsys):
    with pytest.raises(CheckpointUnreadable), failing_fast(ends_process=False):
        raise CheckpointUnreadable("a newer version wrote it")
    assert capsys.readouterr().err == ""


def test_an_explained_error_in_a_program_that_is_one_of_several_ends_all(store):
    with pytest.raises(Left), failing_fast(ends_process=False):
        raise CheckpointSaveError("the disk is full")
    assert store.events == ["post", "barrier", 1]


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (CheckpointSaveError("the disk is full"), 1, "error: the disk is full\n"),
        (LeaseLost("it was deleted"), 1, "error: it was deleted\n"),
        (
            ConfigError(Problem("data.path", "is not text")),
            2,
            "config error: data.path: is not text\n1 problem found\n",
        ),
    ],
)
def test_an_explained_error_of_one_of_several_is_posted_before_it_leaves(
    store, capsys, error, code, printed
):
    with pytest.raises(Left), failing_fast():
        raise error
    assert store.events == ["post", "barrier", code]
    assert json.loads(*store.posted.values()) == [code, f"process 1: {error}"]
    assert capsys.readouterr().err == printed


def test_an_explained_error_is_posted_without_the_secrets_in_its_urls(store):
    with pytest.raises(Left), failing_fast():
        raise CheckpointSaveError("copying to s3://me:pass-word@bucket/runs failed")
    reason = "process 1: copying to s3://***@bucket/runs failed"
    assert json.loads(*store.posted.values()) == [1, reason]


def test_an_explained_error_that_jax_has_caused_gives_jax_time_to_end_the_process(
    store, monkeypatch
):
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: store.events.append("wait"))
    with pytest.raises(Left), failing_fast():
        raise CheckpointSaveError("failed") from jax.errors.JaxRuntimeError("the coordinator")
    assert store.events == ["wait", "post", "barrier", 1]


def test_an_error_of_jax_in_one_of_several_is_left_to_jax(store):
    with pytest.raises(jax.errors.JaxRuntimeError), failing_fast():
        raise jax.errors.JaxRuntimeError("another process is lost")
    assert store.events == []


@pytest.mark.parametrize(("code", "kind"), [(1, "error"), (2, "config error")])
def test_a_process_leaves_with_the_code_and_the_reason_of_another(store, capsys, code, kind):
    store.key_value_set(failure._REASON, json.dumps((code, "process 0: the disk is full")))
    with pytest.raises(Left):
        failure._listen(threading.Event())
    assert store.events == ["post", "barrier", code]
    assert capsys.readouterr().err == f"\n{kind} in process 0: the disk is full\n"
