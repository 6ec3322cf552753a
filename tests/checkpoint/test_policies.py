"""When a save is due, and which steps are kept."""

import math

import numpy as np
import pytest

from maxpipe.checkpoint.errors import CheckpointUnreadable
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import EVAL_LOSS, Retention
from maxpipe.checkpoint.record import Record, record_file
from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config import CheckpointConfig

LOSSES = {10: 5.0, 20: 3.0, 30: 4.0, 40: None, 50: 3.0, 60: math.nan}


def test_retention_keeps_newest_regular_and_best_steps():
    for settings, kept in [
        ({"keep": 1}, [60]),
        ({"keep": 2}, [50, 60]),
        ({"keep": 10}, [10, 20, 30, 40, 50, 60]),
        ({"keep": 1, "keep_every": 20}, [20, 40, 60]),
        ({"keep": 1, "keep_every": 25}, [50, 60]),
        ({"keep": 1, "keep_best": 1}, [50, 60]),  # of equal losses the newer step
        ({"keep": 1, "keep_best": 3}, [20, 30, 50, 60]),
        ({"keep": 1, "keep_best": 10}, [10, 20, 30, 50, 60]),  # steps without a loss are never best
        ({"keep": 2, "keep_every": 30, "keep_best": 2}, [20, 30, 50, 60]),
    ]:
        retention = Retention(CheckpointConfig(**settings), record_of=LOSSES.get)
        for step, loss in LOSSES.items():
            retention.note(step, {EVAL_LOSS: loss})
        assert sorted(retention.kept(list(LOSSES))) == kept


@pytest.fixture
def save(directory):

    def _save(losses, **settings):
        checkpointer = Checkpointer(directory, CheckpointConfig(**settings))
        for step, loss in losses.items():
            checkpointer.save(
                step, {"x": np.float32([step])}, np.zeros((1, 3), np.int64), {EVAL_LOSS: loss}
            )
        checkpointer.close()
        return checkpointer.steps()

    return _save


def test_retention_after_restart_knows_losses_and_a_damaged_record_is_never_best(save, directory):
    assert save({10: 2.0, 20: 1.0, 30: 3.0}, keep=1, keep_best=2) == [10, 20, 30]
    assert save({40: 4.0}, keep=1, keep_best=2) == [10, 20, 40]
    file = record_file(directory / "20")
    file.write_text(file.read_text().replace('"eval_loss": 1.0', '"eval_loss": 0.5'))
    assert save({50: 3.5}, keep=1, keep_best=2) == [10, 50]


def test_retention_steps_set_aside_neither_count_nor_are_deleted(save, directory):
    assert save({10: 1.0, 20: 2.0}, keep=2) == [10, 20]
    for step in (10, 20):
        StepsDirectory(directory).set_aside(step, "abandoned")
    # Step 10 counts with its new loss.
    assert save({10: 7.0, 20: 2.0, 30: 8.0}, keep=1, keep_best=1) == [20, 30]
    StepsDirectory(directory).set_aside(20, "damaged")
    assert save({40: 4.0}, keep=2, keep_best=1) == [30, 40]
    assert (directory / "20.damaged").is_dir()


def test_retention_record_that_cannot_be_read_now_is_kept_and_judged_later():
    passing = [CheckpointUnreadable("runs/a/10", "[Errno 116] Stale file handle")]

    def record_of(step):
        if step == 10 and passing:
            raise passing.pop()
        return Record(step, {EVAL_LOSS: LOSSES[step]}, {})

    retention = Retention(CheckpointConfig(keep=1, keep_best=1), record_of)
    assert retention.kept([10, 20, 30, 60]) == {10, 20, 60}
    assert retention.kept([10, 20, 30, 60]) == {20, 60}
