"""The checkpoints that a complete run keeps, and resuming with other dtypes."""

import numpy as np
import pytest
from helpers.runs import checkpoints, losses, rows, saved
from helpers.training_process import train_here

from maxpipe.checkpoint.record import step_record

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.grid
def test_train_keeps_newest_best_and_every_third_checkpoint(tmp_path):
    words = (
        "steps=8",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        "eval.every=2",
        "data.source=python_stdlib",
    )
    assert train_here(tmp_path, *words, "checkpoint.keep_every=3", "checkpoint.keep_best=2") == 0
    root = tmp_path / "base"
    evaluated = {row["step"]: row["eval_loss"] for row in rows(root) if "eval_loss" in row}
    assert list(evaluated) == [2, 4, 6, 8]
    best = sorted(evaluated, key=evaluated.get)[:2]
    assert checkpoints(root) == sorted({3, 6, 8, *best})
    in_records = {
        step: step_record(root / "checkpoints" / str(step)).meta["eval_loss"]
        for step in checkpoints(root)
    }
    assert in_records == {step: evaluated.get(step) for step in checkpoints(root)}


def test_train_convert_dtype_resumes_with_other_dtype(tmp_path, capsys):
    words = ("steps=4", "checkpoint.every=2", "data.source=python_stdlib")
    assert train_here(tmp_path, *words, "stop_after=2") == 0
    assert train_here(tmp_path, *words, "model.param_dtype=bfloat16") == 2
    assert "checkpoint.convert_dtype=true continues with the change" in capsys.readouterr().err
    assert (
        train_here(tmp_path, *words, "model.param_dtype=bfloat16", "checkpoint.convert_dtype=true")
        == 0
    )
    assert (
        "arrays of checkpoint 2 were converted to the dtypes of this run" in capsys.readouterr().out
    )
    before, after = saved(tmp_path / "base", 2), saved(tmp_path / "base", 4)
    assert {array.dtype.name for name, array in before.items() if name.startswith("params")} == {
        "float32"
    }
    assert {array.dtype.name for name, array in after.items() if name.startswith("params")} == {
        "bfloat16"
    }
    found = losses(tmp_path / "base")
    assert list(found) == [1, 2, 3, 4]
    assert found[3][0] == pytest.approx(found[2][0], abs=0.5)
    assert all(np.isfinite(array).all() for array in after.values() if array.dtype == np.float32)
