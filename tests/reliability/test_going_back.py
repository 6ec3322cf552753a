"""Runs that go back to an earlier step, and are ended and started again at different times."""

import shutil

import pytest
from helpers.runs import assert_same_run, checkpoints, losses
from helpers.training_process import train_here

from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.training.batches import BatchPlacer

HERE = ("checkpoint.every=2", "checkpoint.keep=100", "steps=12")
BACK = "checkpoint.resume=2"
FOLLOWED = "was followed by an earlier attempt of this job, which has reached step"
OTHER = "optimizer.learning_rate=0.01"  # so that the two ways from step 2 on have other losses


def run(directory, *words):
    return train_here(directory, *HERE, *words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    assert run(directory) == 0
    return directory / "base"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stopped")
    assert run(directory, "stop_after=8") == 0
    return directory / "base"


@pytest.fixture
def root(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "base")


@pytest.fixture
def attempt(monkeypatch):

    def _attempt(number, job="job"):
        monkeypatch.setenv("MAXPIPE_JOB", job)
        monkeypatch.setenv("MAXPIPE_ATTEMPT", str(number))

    return _attempt


def abandoned(root):
    return sorted(path.name for path in (root / "checkpoints").glob("*abandoned*"))


class TestOncePerJob:
    def test_train_started_again_by_its_job_continues_after_going_back_once(
        self, root, tmp_path, attempt, capsys
    ):
        attempt(1)
        assert run(tmp_path, BACK, "stop_after=5") == 0
        assert checkpoints(root) == [2, 4, 5]
        assert abandoned(root) == ["4.abandoned", "6.abandoned", "8.abandoned"]
        assert FOLLOWED not in capsys.readouterr().out
        # The step to go back to need not be kept any longer.
        attempt(2)
        assert run(tmp_path, BACK, "stop_after=7", "checkpoint.keep=1") == 0
        assert f"checkpoint.resume=2 {FOLLOWED} 5:" in capsys.readouterr().out
        assert checkpoints(root) == [7]
        attempt(3)
        assert run(tmp_path, BACK) == 0
        assert f"{FOLLOWED} 7:" in capsys.readouterr().out
        assert checkpoints(root) == [7, 8, 10, 12]
        assert len(abandoned(root)) == 3
        assert sorted(losses(root)) == [*range(1, 13)]
        attempt(4)
        assert run(tmp_path, BACK) == 0
        assert "is finished: step 12 is saved" in capsys.readouterr().out

    def test_train_that_was_to_begin_anew_continues_in_later_attempts(
        self, tmp_path, attempt, capsys
    ):
        words = ("checkpoint.resume=never", "stop_after=4")
        attempt(1)
        assert run(tmp_path, *words) == 0
        attempt(2)
        assert run(tmp_path, words[0], "stop_after=6") == 0
        assert f"checkpoint.resume=never {FOLLOWED} 4:" in capsys.readouterr().out
        attempt(1, job="another")
        assert run(tmp_path, words[0]) == 2
        assert "never, but there are committed steps" in capsys.readouterr().err

    def test_train_that_goes_back_in_attempts_has_the_bits_of_one_start(
        self, root, whole, tmp_path, attempt
    ):
        for number in (1, 2, 3):
            attempt(number)
            assert run(tmp_path, BACK, f"stop_after={4 * number}") == 0
        assert_same_run(root, whole, 12)


class Crash(BaseException):
    """The end of a process, as far as a process can survive it."""


def crash_at(monkeypatch, owner, name, call, start):
    """Call `start`, and let the call of this number of a method, counted from 1, end it."""
    original, calls = getattr(owner, name), []

    def method(*arguments, **named):
        calls.append(None)
        if len(calls) == call:
            raise Crash
        return original(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, method)
        with pytest.raises(Crash):
            start()


class TestRowsOfMetrics:
    @pytest.mark.parametrize(
        ("owner", "name", "call"),
        [
            (BatchPlacer, "__call__", 1),
            (BatchPlacer, "__call__", 2),
            (StepsDirectory, "set_aside", 2),
        ],
        ids=["while compiling", "before the first save", "while steps are set aside"],
    )
    def test_train_that_went_back_and_ended_early_leaves_the_rows_of_the_steps_that_stay(
        self, root, tmp_path, monkeypatch, whole, owner, name, call
    ):
        expected = losses(whole)
        for _ in range(2):
            crash_at(monkeypatch, owner, name, call, lambda: run(tmp_path, BACK, OTHER))
            assert losses(root) == {step: expected[step] for step in range(1, 9)}
            if name == "set_aside":
                break  # what is saved as step 4 is set aside already
        assert run(tmp_path) == 0
        assert losses(root) == expected
        assert not (root / "metrics.unsaved.jsonl").exists()
