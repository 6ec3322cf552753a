"""Which steps are kept, by themselves and on disk."""

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
        ({"keep": 1, "keep_best": 1}, [50, 60]),  # of equal ones the newer
        ({"keep": 1, "keep_best": 3}, [20, 30, 50, 60]),
        ({"keep": 1, "keep_best": 10}, [10, 20, 30, 50, 60]),  # without a loss no step is good
        ({"keep": 2, "keep_every": 30, "keep_best": 2}, [20, 30, 50, 60]),
    ],
)
def test_what_is_kept(settings, kept):
    retention = Retention(CheckpointConfig(**settings), record_of=LOSSES.get)
    for step, loss in LOSSES.items():
        retention.note(step, {EVAL_LOSS: loss})
    assert sorted(retention.kept(list(LOSSES))) == kept


@pytest.fixture
def save(directory):
    """save({step: loss}, **settings) -> committed steps, by a checkpointer of its own."""

    def _save(losses, **settings):
        checkpointer = Checkpointer(directory, CheckpointConfig(**settings))
        for step, loss in losses.items():
            checkpointer.save(
                step, {"x": np.float32([step])}, np.zeros((1, 3), np.int64), {EVAL_LOSS: loss}
            )
        checkpointer.close()
        return checkpointer.steps()

    return _save


def test_losses_are_remembered_over_restarts(save):
    assert save({10: 2.0, 20: 1.0, 30: 3.0}, keep=1, keep_best=2) == [10, 20, 30]
    assert save({40: 4.0}, keep=1, keep_best=2) == [10, 20, 40]
    assert save({50: 1.5}, keep=1, keep_best=2) == [20, 50]


def test_settings_may_change_between_starts(save):
    assert save({10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0}, keep=4) == [10, 20, 30, 40]
    assert save({50: 5.0}, keep=1, keep_every=20, keep_best=1) == [10, 20, 40, 50]


def test_a_step_saved_anew_counts_with_its_new_loss(save, directory):
    assert save({10: 1.0, 20: 2.0}, keep=2) == [10, 20]
    StepsDirectory(directory).set_aside(10, "abandoned")
    StepsDirectory(directory).set_aside(20, "abandoned")
    assert save({10: 7.0, 20: 2.0, 30: 8.0}, keep=1, keep_best=1) == [20, 30]


def test_steps_set_aside_neither_count_nor_are_deleted(save, directory):
    assert save({10: 3.0, 20: 1.0, 30: 2.0}, keep=3) == [10, 20, 30]
    StepsDirectory(directory).set_aside(20, "damaged")
    assert save({40: 4.0}, keep=2, keep_best=1) == [30, 40]
    assert (directory / "20.damaged").is_dir()


def test_an_unreadable_record_is_no_best_step_and_no_obstacle(save, directory):
    assert save({10: 1.0, 20: 2.0, 30: 3.0}, keep=3) == [10, 20, 30]
    record = json.loads(record_file(directory / "10").read_text())
    record["meta"][EVAL_LOSS] = 0.5  # the checksum no longer fits
    record_file(directory / "10").write_text(json.dumps(record))
    assert save({40: 4.0}, keep=1, keep_best=1) == [20, 40]


def test_the_loss_is_not_a_number():
    retention = Retention(CheckpointConfig(keep=1, keep_best=1), record_of=LOSSES.get)
    for step, loss in ((1, math.nan), (2, 3.0), (3, None)):
        retention.note(step, {EVAL_LOSS: loss})
    assert retention.kept([1, 2, 3]) == {2, 3}
