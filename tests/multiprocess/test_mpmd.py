"""The mpmd engine in several processes, each with stages of its own."""

import os
import signal
import time
from statistics import median

import pytest
from helpers.members import ends, members
from helpers.mpmd_processes import assert_equal_to_sequential, run_cases
from helpers.runs import assert_same_run, checkpoints, losses, rows
from helpers.training_process import command, run, steps_of

HEARTBEAT = 10
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

OTHER_IN_ONE = """
import os, sys
import maxpipe
from maxpipe import train

own = []
if os.environ["JAX_PROCESS_ID"] == "1":
    own = os.environ["OWN_WORDS"].split()
    maxpipe.__version__ = os.environ["OWN_VERSION"] or maxpipe.__version__
sys.exit(train.main(sys.argv[1:] + own))
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
    """Let this process, and those that it starts, use one core only."""
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
    with members(tmp_path, 2, words, name) as started:
        codes, output = ends(started)
    assert codes == [0, 0], output
    return output


def evaluations(root):
    return {row["step"]: row["eval_loss"] for row in rows(root) if "eval_loss" in row}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.grid)])
def test_train_lost_process_ends_other_and_same_command_finishes_with_same_bits(tmp_path, victim):
    words = (*RUN, *STAGES, "steps=1000", "checkpoint.every=2", "eval.every=0")
    words = (*words, f"mesh.heartbeat_timeout_seconds={HEARTBEAT}")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with members(tmp_path, 2, command(parts, *words), "lost") as started:
        started[0].wait_for("step    9/")
        killed_at = time.monotonic()
        started[victim].send(signal.SIGKILL)
        codes, output = ends(started)
        assert time.monotonic() - killed_at < HEARTBEAT + 15
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] in (-signal.SIGABRT, 134), output  # the same in a shell
    last = max(checkpoints(parts / "base")) + 3
    words = (*words, f"stop_after={last}")
    in_two_processes(tmp_path, command(parts, *words), "again")
    in_two_processes(tmp_path, command(whole, *words), "whole")
    assert_same_run(whole / "base", parts / "base", last)


@pytest.mark.slow
def test_train_sigterm_to_one_process_stops_both_after_same_step(tmp_path):
    words = command(tmp_path, *RUN, *STAGES, "steps=1000", "checkpoint.every=1000", "eval.every=0")
    with members(tmp_path, 2, words) as started:
        started[0].wait_for("step    3/")
        started[1].send(signal.SIGTERM)
        codes, output = ends(started)
    assert codes == [75, 75], output
    assert checkpoints(tmp_path / "base") == [max(steps_of(tmp_path))]


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
def test_train_that_diverges_on_one_stage_ends_both_with_42(tmp_path):
    words = ("optimizer.learning_rate=1e30", "optimizer.max_consecutive_skips=2", "steps=8")
    with members(tmp_path, 2, command(tmp_path, *RUN, *STAGES, *words)) as started:
        codes, output = ends(started)
    assert codes == [42, 42], output
    assert "update skipped" in output


@pytest.mark.slow
def test_train_of_other_programs_in_one_process_ends_both_with_2(tmp_path):
    words = command(tmp_path, *RUN, *STAGES)
    with members(tmp_path, 2, words, program=A_PROGRAM_OF_ITS_OWN) as started:
        codes, output = ends(started)
    assert codes == [2, 2], output
    for process in started:
        assert "traced program: the processes of this run differ: " in process.output
    assert not checkpoints(tmp_path / "base")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own_words", "own_version", "name"),
    [
        ("optimizer.learning_rate=0.5", "", "optimizer.learning_rate"),
        ("mesh.simulated_devices=8", "", "mesh.simulated_devices"),
        ("data.path=other", "", "data.path"),
        ("", "0.0.1", "version of maxpipe"),
    ],
    ids=["configuration", "devices", "data", "version"],
)
def test_train_started_otherwise_in_one_process_ends_both_with_2_and_one_message(
    tmp_path, monkeypatch, own_words, own_version, name
):
    monkeypatch.chdir(tmp_path)
    for directory in ("corpus", "other"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.jsonl").write_text(f'{{"text": "{directory}"}}\n' * 9)
    monkeypatch.setenv("OWN_WORDS", own_words)
    monkeypatch.setenv("OWN_VERSION", own_version)
    words = command(tmp_path, *RUN, *STAGES, "data.source=jsonl", "data.path=corpus")
    with members(tmp_path, 2, words, program=OTHER_IN_ONE) as started:
        codes, output = ends(started)
    assert codes == [2, 2], output
    for process in started:
        assert process.output.count("config error") == 1
        assert f"{name}: the processes of this run differ: " in process.output
    assert "Traceback" not in output
    assert not (tmp_path / "base").exists()
