"""A tracker in a thread of its own neither slows nor ends training."""

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from maxpipe.telemetry.background import Background, close_all

ENOUGH = 60.0  # seconds, on a busy machine


def _close(*backgrounds: Background, is_done: bool = True, seconds: float = ENOUGH) -> None:
    close_all(backgrounds, is_done=is_done, seconds=seconds)


class Recording:
    """A tracker that keeps what it gets, and waits for `may_go` before each point.

    Args:
      failures: how often the points of a step are refused.
    """

    def __init__(self, failures: Mapping[int, int] = MappingProxyType({})):
        self.place = "here"
        self.points: list[tuple[int, Mapping[str, object]]] = []
        self.is_done: bool | None = None
        self.may_go = threading.Event()
        self._failures = dict(failures)

    def log(self, step: int, scalars: Mapping[str, object]) -> None:
        assert self.may_go.wait(ENOUGH)
        if self._failures.get(step):
            self._failures[step] -= 1
            raise RuntimeError("no\nroute to https://me:secret@server")
        self.points.append((step, scalars))

    def close(self, *, is_done: bool) -> None:
        self.is_done = is_done


@pytest.mark.parametrize("is_done", [True, False])
def test_background_hands_over_all_points_in_order_and_closes(is_done: bool) -> None:
    tracker, lines = Recording(), list[str]()
    tracker.may_go.set()
    background = Background("t", lambda: tracker, lines.append)
    for step in range(100):
        background.log(step, {"a": step})
    _close(background, is_done=is_done)
    assert tracker.points == [(step, {"a": step}) for step in range(100)]
    assert tracker.is_done is is_done
    assert lines == ["t: here"]


def test_background_points_that_fail_are_sent_again_and_the_error_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "route")
    tracker, lines = Recording({3: 2, 5: 1}), list[str]()
    tracker.may_go.set()
    background = Background("t", lambda: tracker, lines.append, first_pause=0.01)
    for step in range(7):
        background.log(step, {})
    until = time.monotonic() + ENOUGH
    while len(tracker.points) < 7 and time.monotonic() < until:
        time.sleep(0.01)
    _close(background)
    assert [step for step, _ in tracker.points] == [*range(7)]
    assert tracker.is_done
    warning = "warning: t has failed: RuntimeError: no *** to https://***@server; training"
    assert lines == ["t: here", f"{warning} continues, and it is tried again"]


def test_background_at_the_end_leaves_out_a_row_that_is_refused_and_closes() -> None:
    tracker, lines = Recording({1: 99}), list[str]()
    background = Background("t", lambda: tracker, lines.append, first_pause=1e6)
    for step in range(4):
        background.log(step, {})
    background.end(is_done=True)
    tracker.may_go.set()
    _close(background)
    assert [step for step, _ in tracker.points] == [0, 2, 3]
    assert tracker.is_done
    assert lines[-1] == "warning: t lacks 1 rows of points; metrics.jsonl has all"


def test_background_row_that_is_always_refused_blocks_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maxpipe.telemetry.background._LONGEST_PAUSE", 0.001)
    tracker, lines = Recording({0: 10**9}), list[str]()
    tracker.may_go.set()
    background = Background("t", lambda: tracker, lines.append)
    background.log(0, {})
    background.log(1, {})
    until = time.monotonic() + ENOUGH
    while not tracker.points and time.monotonic() < until:
        time.sleep(0.01)
    assert tracker.points == [(1, {})]
    _close(background)


def test_background_that_cannot_be_opened_is_said_once() -> None:
    def refuse() -> Recording:
        raise OSError("no server")

    lines = list[str]()
    background = Background("t", refuse, lines.append)
    _close(background)
    background.log(1, {})
    assert lines == ["warning: t has failed: OSError: no server; training continues without it"]


def test_background_does_not_wait_for_a_tracker_that_hangs() -> None:
    tracker, lines = Recording(), list[str]()
    backgrounds = [
        Background(name, lambda: tracker, lines.append, num_waiting=5) for name in "abcdefgh"
    ]
    started = time.monotonic()
    for background in backgrounds:
        for step in range(100):
            background.log(step, {})
    _close(*backgrounds, seconds=1.0)
    assert 1 <= time.monotonic() - started < 7  # for all of them together
    assert [line for line in lines if "in time" in line] == [
        f"warning: {name} has not taken all points in time at the run's end; metrics.jsonl has all"
        for name in "abcdefgh"
    ]
    tracker.may_go.set()


def test_background_says_how_much_a_slow_tracker_lacks() -> None:
    tracker, lines = Recording(), list[str]()
    background = Background("t", lambda: tracker, lines.append, num_waiting=5)
    for step in range(100):
        background.log(step, {})
    tracker.may_go.set()
    _close(background)
    lost = 100 - len(tracker.points)
    assert 94 <= lost <= 95
    assert lines[-1] == f"warning: t lacks {lost} rows of points; metrics.jsonl has all"
