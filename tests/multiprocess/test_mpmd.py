"""The mpmd engine in several processes, each with stages of its own."""

import pytest
from helpers.members import ends, members
from helpers.mpmd_processes import assert_equal_to_sequential, run_cases
from helpers.runs import checkpoints, losses, rows
from helpers.training_process import command, run

TWO_STAGES = {
    "mesh.ici.stage": 2,
    "mesh.ici.data": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.num_microbatches": 4,
}
RUN = (
    "mesh.simulated_devices=2",
    "mesh.ici.data=1",
    "mesh.ici.fsdp=1",
    "pipeline.num_repeats=1",
    "pipeline.num_microbatches=4",
    "steps=4",
    "eval.every=2",
    "eval.batches=2",
)
STAGES = ("mesh.ici.stage=2", "pipeline.schedule=1f1b")
SEQUENTIAL = ("mesh.ici.stage=1", "mesh.ici.data=2", "pipeline.engine=sequential")


def test_loss_and_gradients_of_two_processes_equal_sequential(tmp_path):
    cases = [TWO_STAGES]
    outcomes = run_cases(tmp_path, 2, cases)
    assert_equal_to_sequential(cases, outcomes)
    # Each process compiles its own stage.
    assert [sorted(names) for names in outcomes[0].compiled] == [["B0", "F0"], ["B1", "F1"]]


def in_two_processes(tmp_path, words, name):
    with members(tmp_path, 2, words, name) as started:
        codes, output = ends(started)
    assert codes == [0, 0], output
    return output


def evaluations(root):
    return {row["step"]: row["eval_loss"] for row in rows(root) if "eval_loss" in row}


def test_train_in_two_processes_goes_on_with_sequential_engine_and_back(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = run(tmp_path / "whole.log", command(whole, *RUN, *SEQUENTIAL))
    assert code == 0, output
    words = command(parts, *RUN, *STAGES)
    output = in_two_processes(tmp_path, [*words, "stop_after=2"], "before")
    assert "transfers between processes: jax.device_put, over sockets" in output
    code, output = run(tmp_path / "one.log", command(parts, *RUN, *SEQUENTIAL, "stop_after=3"))
    assert code == 0, output
    assert "resumed after step 2" in output
    assert "resumed after step 3" in in_two_processes(tmp_path, words, "after")
    assert checkpoints(parts / "base")[-1] == 4
    expected, actual = losses(whole / "base"), losses(parts / "base")
    assert list(expected) == list(actual) == [1, 2, 3, 4]
    for step in expected:
        assert actual[step] == pytest.approx(expected[step], rel=1e-5)
    assert list(evaluations(parts / "base")) == [2, 4]
    assert evaluations(parts / "base") == pytest.approx(evaluations(whole / "base"), rel=1e-5)
