"""A checkpoint of another run under this run's name is never trained on."""

import shutil

import pytest
from helpers.runs import checkpoints, losses, rows, saved
from helpers.training_process import train_here

from maxpipe.checkpoint.record import step_record

STEPS = ("steps=4", "optimizer.decay_steps=4", "checkpoint.every=1", "checkpoint.keep=9")


def main(output_dir, *words):
    return train_here(output_dir, *STEPS, *words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for name, seed in (("ours", 0), ("theirs", 1)):
        assert main(directory / name, f"seed={seed}", "stop_after=2") == 0
    return directory


@pytest.fixture
def ours(runs, tmp_path):
    return shutil.copytree(runs / "ours", tmp_path / "ours") / "base"


def put(runs, ours, step):
    shutil.rmtree(ours / "checkpoints" / str(step))
    source = runs / "theirs" / "base" / "checkpoints" / str(step)
    shutil.copytree(source, ours / "checkpoints" / str(step))


def assert_refused(ours, capsys):
    before = (ours / "metrics.jsonl").read_bytes()
    assert main(ours.parent) == 2
    assert "seed: is 0, but the checkpoints in" in (error := capsys.readouterr().err)
    assert "were made with 1; checkpoint.accept_changes=[seed] continues" in error
    assert (ours / "metrics.jsonl").read_bytes() == before


def test_train_newest_checkpoint_of_another_run_is_refused_before_it_is_read(runs, ours, capsys):
    put(runs, ours, 2)
    for file in (ours / "checkpoints" / "2" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    config = (ours / "config.yml").read_bytes()
    assert_refused(ours, capsys)
    assert (ours / "config.yml").read_bytes() == config
    assert checkpoints(ours) == [1, 2]


def test_train_older_checkpoint_of_another_run_is_not_fallen_back_to(runs, ours, capsys):
    """The record of the newest checkpoint is sound and ours; its arrays are not."""
    put(runs, ours, 1)
    shutil.rmtree(ours / "checkpoints" / "2" / "arrays")
    assert_refused(ours, capsys)


def test_train_other_seed_is_trained_on_if_accepted_and_said(runs, ours, capsys):
    put(runs, ours, 2)
    assert main(ours.parent, "checkpoint.accept_changes=[seed]") == 0
    assert "changed since step 2: seed 1 -> 0\n" in capsys.readouterr().out
    assert {"step": 2, "changed": "seed", "before": 1, "now": 0} in rows(ours)
    assert sorted(losses(ours)) == [1, 2, 3, 4]


def test_train_other_optimizer_begins_with_a_new_state_if_accepted(ours, capsys):
    words = ["optimizer.name=lion", "optimizer.learning_rate=1e-5"]
    assert main(ours.parent, *words) == 2
    assert "checkpoint.accept_changes=[optimizer] continues" in capsys.readouterr().err
    assert main(ours.parent, *words, "checkpoint.accept_changes=[optimizer]") == 0
    printed = capsys.readouterr().out
    assert "changed since step 2: optimizer.name adamw -> lion\n" in printed
    assert "the state of the optimizer begins anew" in printed
    found = losses(ours)
    assert sorted(found) == [1, 2, 3, 4]
    assert found[3][0] < found[1][0]  # with the weights of step 2


def test_train_muon_after_another_optimizer_still_trains_matrices(ours):
    """Its state begins with constants that are not zero."""
    words = ["optimizer.name=muon", "optimizer.weight_decay=0"]
    assert main(ours.parent, *words, "checkpoint.accept_changes=[optimizer]") == 0
    before, after = (step_record(ours / "checkpoints" / step).leaves for step in "24")
    name = "params.layers.mlp.gate"
    assert before[name].digest != after[name].digest


def test_train_convert_dtype_resumes_with_other_dtype(ours, capsys):
    words = ["model.param_dtype=bfloat16"]
    assert main(ours.parent, *words) == 2
    assert "checkpoint.convert_dtype=true continues with the change" in capsys.readouterr().err
    assert main(ours.parent, *words, "checkpoint.convert_dtype=true") == 0
    said = "arrays of checkpoint 2 were converted to the dtypes of this run"
    assert said in capsys.readouterr().out
    for step, dtype in ((2, "float32"), (4, "bfloat16")):
        arrays = saved(ours, step)
        params = {a.dtype.name for name, a in arrays.items() if name.startswith("params")}
        assert params == {dtype}
    found = losses(ours)
    assert sorted(found) == [1, 2, 3, 4]
    assert found[3][0] == pytest.approx(found[2][0], abs=0.5)


@pytest.mark.parametrize("accepted", [[], ["checkpoint.accept_changes=[model]"]])
def test_train_other_shapes_name_their_keys_and_no_way_to_accept_them(ours, capsys, accepted):
    words = ["model.mlp_dim=96", "model.norm_eps=1e-4", *accepted]
    assert main(ours.parent, *words) == 2
    error = capsys.readouterr().err
    (line,) = (line for line in error.splitlines() if "model.mlp_dim: is 96" in line)
    assert line.endswith("; no run continues from arrays of other shapes")
    assert "choose another run_name or restore its values" in error
    assert ("model.norm_eps: " in error) == (not accepted)


def test_train_checkpoints_moved_away_leave_a_run_that_starts_again(ours, tmp_path, capsys):
    (ours / "checkpoints").rename(tmp_path / "away")
    assert main(ours.parent, "stop_after=1") == 0
    assert "4 steps, fresh" in capsys.readouterr().out
    assert sorted(losses(ours)) == [1]
