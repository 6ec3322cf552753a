"""How a process ends after an error, alone and as one of several."""

import json
import threading

import jax
import pytest

from maxpipe.checkpoint.errors import CheckpointSaveError, CheckpointUnreadable
from maxpipe.config import ConfigError, Problem
from maxpipe.devices import processes
from maxpipe.storage.lease import LeaseLost
from maxpipe.supervise import ending, failure
from maxpipe.supervise.failure import ending_with_lost_process, failing_fast


class Left(BaseException):
    """Stands for the end of the process."""


class Store:
    """The coordination service's store of one of two processes; records what happens in turn."""

    def __init__(self):
        self.posted = {}
        self.events = []
        self.asked_in_vain = threading.Event()
        self.missed = []

    def key_value_set(self, key, value, allow_overwrite=False):
        self.posted[key] = value
        self.events.append("post")

    def key_value_try_get(self, key):
        if key not in self.posted:
            self.asked_in_vain.set()
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.posted[key]

    def wait_at_barrier(self, key, timeout):
        self.events.append("barrier")
        if key in self.missed:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


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
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: store.events.append("wait"))
    return store


UNREADABLE = CheckpointUnreadable("runs/a/4", "a newer version wrote it")


@pytest.mark.parametrize(
    ("error", "ends_process", "raised", "printed"),
    [
        (UNREADABLE, True, SystemExit, f"error: {UNREADABLE}\n"),
        (UNREADABLE, False, CheckpointUnreadable, ""),  # a program's own
        (ValueError("unforeseen"), True, ValueError, ""),  # the command shows them
        (ConfigError(Problem("seed", "bad")), True, ConfigError, ""),
    ],
)
def test_an_error_of_a_single_process_is_explained_or_passed_on(
    capsys, error, ends_process, raised, printed
):
    with pytest.raises(raised) as end, failing_fast(ends_process=ends_process):
        raise error
    assert raised is not SystemExit or end.value.code == 1
    assert capsys.readouterr().err == printed


def test_an_explained_error_in_a_program_that_is_one_of_several_ends_all_without_secrets(store):
    with pytest.raises(Left), failing_fast(ends_process=False):
        raise CheckpointSaveError("copying to s3://me:pass-word@bucket/runs failed")
    assert store.events == ["post", "barrier", 1]
    reason = "process 1: copying to s3://***@bucket/runs failed"
    assert json.loads(*store.posted.values()) == [1, reason]


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (LeaseLost("it was deleted"), 1, "error: it was deleted\n"),
        (RuntimeError("unforeseen"), 1, "RuntimeError: unforeseen\n"),
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
    assert capsys.readouterr().err.endswith(printed)


LOST_PROCESS = (
    jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"),
    ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"),
)


@pytest.mark.parametrize("error", LOST_PROCESS)
@pytest.mark.parametrize("is_explained", [False, True])
def test_an_error_of_jax_that_not_all_processes_come_to_ends_all_with_134(
    store, capsys, error, is_explained
):
    store.missed.append(failure._FAILED_ALIKE)
    raised = CheckpointSaveError("failed") if is_explained else error
    with pytest.raises(Left), failing_fast():
        raise raised from error if is_explained else None
    assert store.events == ["barrier", "post", "barrier", 134]
    assert json.loads(*store.posted.values())[0] == 134
    assert capsys.readouterr().err.startswith("error: failed" if is_explained else "Traceback")


def test_an_error_of_jax_that_all_processes_come_to_ends_with_1(store):
    with pytest.raises(Left), failing_fast():
        raise jax.errors.JaxRuntimeError("INTERNAL: the compiler has failed")
    assert store.events == ["barrier", 1]


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a"), failure.MemoryTooSmall("a")]
)
def test_lack_of_memory_in_one_process_ends_all_with_1_before_it_closes_anything(store, error):
    with pytest.raises(Left), ending_with_lost_process():
        raise error
    assert store.events == ["post", "barrier", 1]


def test_a_process_that_leaves_for_a_reason_tells_the_others(store, monkeypatch):
    # The process would be over before its listener reads the reason.
    monkeypatch.setattr(failure, "_POLL_SECONDS", 60.0)
    monkeypatch.setattr(ending.os, "_exit", store.events.append)
    with failing_fast():
        ending.leave(124, "nothing has happened")
        ending.leave(75)
    assert store.events == ["post", "barrier", 124, 75]
    assert json.loads(*store.posted.values()) == [124, "process 1: nothing has happened"]


def test_process_0_that_leaves_for_a_reason_outlasts_the_wait_for_a_stuck_process(
    store, monkeypatch
):
    ended_at = []

    def expire(key, timeout):
        ended_at.append(timeout / 1000)
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(store, "wait_at_barrier", expire)
    monkeypatch.setattr(processes, "index", lambda: 0)
    monkeypatch.setattr(failure.time, "sleep", lambda seconds: ended_at.append(seconds))
    # Nor does the listener read the reason: the process would be over by then.
    monkeypatch.setattr(failure, "_POLL_SECONDS", 60.0)
    monkeypatch.setattr(ending.os, "_exit", store.events.append)
    with failing_fast():
        ending.leave(75, "a signal")
    assert ended_at[1:] == [1], "the others need its service"
    assert sum(ended_at) < ending._LAST_ACTS_SECONDS


def test_a_process_leaves_with_its_stacks_when_another_one_hangs(store, capfd):
    store.key_value_set(failure._REASON, json.dumps((124, "process 0: nothing has happened")))
    with pytest.raises(Left):
        failure._listen(threading.Event())
    assert store.events == ["post", "barrier", 124]
    printed = capfd.readouterr().err
    assert "hung in process 0: nothing has happened" in printed
    assert "in test_a_process_leaves_with_its_stacks_when_another_one_hangs" in printed


def listeners():
    return [thread for thread in threading.enumerate() if thread.name == "ends"]


def test_a_process_leaves_for_the_reason_of_another_whatever_it_does(store, monkeypatch, capsys):
    left = threading.Event()
    monkeypatch.setattr(failure, "leave", lambda code: (store.events.append(code), left.set()))
    with failing_fast():
        assert len(listeners()) == 1
        assert store.asked_in_vain.wait(60)
        store.key_value_set(failure._REASON, json.dumps((1, "process 0: the disk is full")))
        assert left.wait(60)
    assert store.events[:3] == ["post", "barrier", 1]
    assert capsys.readouterr().err.startswith("\nerror in process 0: the disk is full\n")
    assert listeners() == []
