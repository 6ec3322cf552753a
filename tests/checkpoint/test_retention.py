"""The steps that retention keeps, computed and on disk."""

import json
import math

import numpy as np
import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import EVAL_LOSS, Retention
from maxpipe.checkpoint.record import record_file
from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config import CheckpointConfig

LOSSES = {10: 5.0, 20: 3.0, 30: 4.0, 40: None, 50: 3.0, 60: 9.0}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep": 1}, [60]),
        ({"keep": 2}, [50, 60]),
        ({"keep": 10}, [10, 20, 30, 40, 50, 60]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep": 1, "keep_every": 25}, [50, 60]),
        ({"keep": 1, "keep_best": 1}, [50, 60]),  # of equal losses the newer step
        ({"keep": 1, "keep_best": 3}, [20, 30, 50, 60]),
        ({"keep": 1, "keep_best": 10}, [10, 20, 30, 50, 60]),  # a step without loss is never best
        ({"keep": 2, "keep_every": 30, "keep_best": 2}, [20, 30, 50, 60]),
    ],
)
def test_retention_keeps_newest_regular_and_best_steps(settings, kept):
    retention = Retention(CheckpointConfig(**settings), record_of=LOSSES.get)
    for step, loss in LOSSES.items():
        retention.note(step, {EVAL_LOSS: loss})
    assert sorted(retention.kept(list(LOSSES))) == kept


@pytest.fixture
def save(directory):
    """Return a function that saves {step: loss} with a new checkpointer and returns its steps."""

    def _save(losses, **settings):
        checkpointer = Checkpointer(directory, CheckpointConfig(**settings))
        for step, loss in losses.items():
            checkpointer.save(
                step, {"x": np.float32([step])}, np.zeros((1, 3), np.int64), {EVAL_LOSS: loss}
            )
        checkpointer.close()
        return checkpointer.steps()

    return _save


def test_retention_after_restart_knows_losses(save):
    assert save({10: 2.0, 20: 1.0, 30: 3.0}, keep=1, keep_best=2) == [10, 20, 30]
    assert save({40: 4.0}, keep=1, keep_best=2) == [10, 20, 40]
    assert save({50: 1.5}, keep=1, keep_best=2) == [20, 50]


def test_retention_after_restart_uses_new_settings(save):
    assert save({10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0}, keep=4) == [10, 20, 30, 40]
    assert save({50: 5.0}, keep=1, keep_every=20, keep_best=1) == [10, 20, 40, 50]


def test_retention_step_saved_again_counts_with_new_loss(save, directory):
    assert save({10: 1.0, 20: 2.0}, keep=2) == [10, 20]
    StepsDirectory(directory).set_aside(10, "abandoned")
    StepsDirectory(directory).set_aside(20, "abandoned")
    assert save({10: 7.0, 20: 2.0, 30: 8.0}, keep=1, keep_best=1) == [20, 30]


def test_retention_steps_set_aside_neither_count_nor_are_deleted(save, directory):
    assert save({10: 3.0, 20: 1.0, 30: 2.0}, keep=3) == [10, 20, 30]
    StepsDirectory(directory).set_aside(20, "damaged")
    assert save({40: 4.0}, keep=2, keep_best=1) == [30, 40]
    assert (directory / "20.damaged").is_dir()


def test_retention_unreadable_record_is_never_best(save, directory):
    assert save({10: 1.0, 20: 2.0, 30: 3.0}, keep=3) == [10, 20, 30]
    record = json.loads(record_file(directory / "10").read_text())
    record["meta"][EVAL_LOSS] = 0.5  # the checksum no longer fits
    record_file(directory / "10").write_text(json.dumps(record))
    assert save({40: 4.0}, keep=1, keep_best=1) == [20, 40]


def test_retention_nan_loss_is_never_best():
    retention = Retention(CheckpointConfig(keep=1, keep_best=1), record_of=LOSSES.get)
    for step, loss in ((1, math.nan), (2, 3.0), (3, None)):
        retention.note(step, {EVAL_LOSS: loss})
    assert retention.kept([1, 2, 3]) == {2, 3}
