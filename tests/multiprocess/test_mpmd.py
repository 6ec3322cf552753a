"""The mpmd engine in several processes, each with stages of its own."""

import os
from statistics import median

import pytest
from helpers.mpmd_processes import assert_equal_to_sequential, run_cases
from helpers.runs import checkpoints, losses, rows
from helpers.training_process import command, ended, members, output_of, run

# More units of a step than the 32 programs that XLA takes on a device before it blocks a launch.
TWO_STAGES = {
    "mesh.ici.stage": 2,
    "mesh.ici.fsdp": 2,
    "pipeline.schedule": "1f1b",
    "pipeline.num_microbatches": 20,
    "data.global_batch_size": 40,
}
RUN = (
    "mesh.simulated_devices=4",
    "mesh.ici.data=1",
    "mesh.ici.fsdp=2",
    "pipeline.num_repeats=1",
    "pipeline.num_microbatches=8",
    "data.global_batch_size=32",
    "steps=4",
    "eval.every=2",
    "eval.batches=2",
)
# Steps whose own time is short on a busy machine, too.
QUICK = ("mesh.simulated_devices=2", "mesh.ici.fsdp=1", "pipeline.num_microbatches=4")
STAGES = ("mesh.ici.stage=2", "pipeline.schedule=1f1b")
SEQUENTIAL = ("mesh.ici.stage=1", "mesh.ici.data=2", "pipeline.engine=sequential")

# As if one process ran other code that the comparison of files did not see.
A_PROGRAM_OF_ITS_OWN = """
import os, sys
from maxpipe import train
from maxpipe.model.program import ModelProgram

original = ModelProgram.embed

def embed(self, params, tokens):
    return original(self, params, tokens) * 2

if os.environ["JAX_PROCESS_ID"] == "1":
    ModelProgram.embed = embed
sys.exit(train.main(sys.argv[1:]))
"""

# One process waits for every batch, as for a slow disk.
SLOW_DATA = """
import os, time
from maxpipe.data.loader import Loader

original = Loader.__next__

def next_batch(self):
    time.sleep(0.2 if os.environ["JAX_PROCESS_ID"] == os.environ["SLOW_PROCESS"] else 0)
    return original(self)

Loader.__next__ = next_batch
"""


@pytest.fixture
def one_core():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def test_loss_and_gradients_of_two_processes_on_one_core_equal_sequential(tmp_path, one_core):
    cases = [TWO_STAGES]
    outcomes = run_cases(tmp_path, 2, cases)
    assert_equal_to_sequential(cases, outcomes)
    # Each process compiles its own stage.
    assert [sorted(names) for names in outcomes[0].compiled] == [["B0", "F0"], ["B1", "F1"]]


def in_two_processes(tmp_path, words, name):
    return output_of(tmp_path, words, [0, 0], name)


def evaluations(root):
    return {row["step"]: row["eval_loss"] for row in rows(root) if "eval_loss" in row}


@pytest.mark.slow
def test_train_in_two_processes_goes_on_with_sequential_engine_and_back(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ramp = "data.batch_ramp=[[0,8],[1,16],[3,32]]"
    code, output = run(tmp_path / "whole.log", command(whole, *RUN, *SEQUENTIAL, ramp))
    assert code == 0, output
    words = command(parts, *RUN, *STAGES, ramp)
    output = in_two_processes(tmp_path, [*words, "stop_after=2"], "before")
    assert "transfers between processes: jax.device_put, over sockets" in output
    code, output = run(
        tmp_path / "one.log", command(parts, *RUN, *SEQUENTIAL, ramp, "stop_after=3")
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1, 0])
def test_train_names_a_slow_process_and_writes_the_seconds_of_each_stage(
    tmp_path, monkeypatch, slow
):
    (tmp_path / "slow_data.py").write_text(SLOW_DATA)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SLOW_PROCESS", str(slow))
    words = (*RUN, *STAGES, *QUICK, "steps=9", "checkpoint.every=3", "--import", "slow_data")
    output = in_two_processes(tmp_path, command(tmp_path, *words), "slow")
    assert output.count("warning:") == 1
    assert f"warning: process {slow} is slow: without waiting for others" in output
    seconds = [row["stage_seconds"] for row in rows(tmp_path / "base") if "loss" in row]
    assert len(seconds) == 9
    # Not the first step, nor the second, whose time begins with the first one's.
    by_stage = list(zip(*seconds[2:], strict=True))
    assert median(by_stage[slow]) > 0.15
    assert median(by_stage[1 - slow]) < 0.15


@pytest.mark.slow
def test_train_of_other_programs_in_one_process_ends_both_with_2(tmp_path):
    words = command(tmp_path, *RUN, *STAGES)
    with members(tmp_path, 2, words, program=A_PROGRAM_OF_ITS_OWN) as started:
        ended(started, [2, 2])
    for process in started:
        assert "traced program: the processes of this run differ: " in process.output
    assert not checkpoints(tmp_path / "base")
