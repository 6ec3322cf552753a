"""A tracker in a thread of its own neither slows nor ends training."""

import threading
import time
from collections.abc import Mapping

import pytest

from maxpipe.telemetry.background import Background


class Recording:
    """A tracker that keeps what it gets, and waits for `may_go` before each point."""

    def __init__(self, fails_at: int = -1):
        self.place = "here"
        self.points: list[tuple[int, Mapping[str, object]]] = []
        self.is_done: bool | None = None
        self.may_go = threading.Event()
        self._fails_at = fails_at

    def log(self, step: int, scalars: Mapping[str, object]) -> None:
        assert self.may_go.wait(30)
        if step == self._fails_at:
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
    background.close(is_done=is_done)
    assert tracker.points == [(step, {"a": step}) for step in range(100)]
    assert tracker.is_done is is_done
    assert lines == ["t: here"]


def test_background_error_is_said_once_without_secrets_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "route")
    tracker, lines = Recording(fails_at=3), list[str]()
    tracker.may_go.set()
    background = Background("t", lambda: tracker, lines.append)
    for step in range(6):
        background.log(step, {})
    background.close(is_done=True)
    assert [step for step, _ in tracker.points] == [0, 1, 2]
    warning = "warning: t has failed: RuntimeError: no *** to https://***@server; training"
    assert lines == ["t: here", f"{warning} continues without it"]


def test_background_that_cannot_be_opened_is_said_once() -> None:
    def refuse() -> Recording:
        raise OSError("no server")

    lines = list[str]()
    background = Background("t", refuse, lines.append)
    background.close(is_done=True)
    background.log(1, {})
    assert lines == ["warning: t has failed: OSError: no server; training continues without it"]


def test_background_does_not_wait_for_a_tracker_that_hangs() -> None:
    tracker, lines = Recording(), list[str]()
    background = Background("t", lambda: tracker, lines.append, close_seconds=0.2, num_waiting=5)
    started = time.monotonic()
    for step in range(100):
        background.log(step, {})
    background.close(is_done=True)
    assert time.monotonic() - started < 5
    assert "has not taken all points 0.2 s after the run's end" in lines[-1]
    tracker.may_go.set()


def test_background_says_how_much_a_slow_tracker_lacks() -> None:
    tracker, lines = Recording(), list[str]()
    background = Background("t", lambda: tracker, lines.append, num_waiting=5)
    for step in range(100):
        background.log(step, {})
    tracker.may_go.set()
    background.close(is_done=True)
    lost = 100 - len(tracker.points)
    assert 94 <= lost <= 95
    assert lines[-1] == (
        f"warning: t was too slow for {lost} rows of points, so it lacks some; "
        "metrics.jsonl has all"
    )
