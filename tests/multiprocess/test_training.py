"""One run as several processes, with the pipeline's stages in different ones."""

import re
import signal
import time

import pytest
from helpers.members import ends, members
from helpers.runs import checkpoints, losses
from helpers.training_process import command, run, steps_of

HEARTBEAT = 10
ENDLESS = ("steps=1000", "checkpoint.every=1000", f"mesh.heartbeat_timeout_seconds={HEARTBEAT}")
SCHEDULES = (pytest.param("circular", marks=pytest.mark.slow), "lockstep_1f1b")

ONE_FAILS = """
import sys
import jax
from maxpipe import train
from maxpipe.training.batches import BatchPlacer

original, calls = BatchPlacer.__call__, []

def call(self, batch):
    calls.append(None)
    if len(calls) == 3 and jax.process_index() == 1:
        raise RuntimeError("the third batch is bad")
    return original(self, batch)

BatchPlacer.__call__ = call
sys.exit(train.main(sys.argv[1:]))
"""

BAD_DATA_IN_ONE = """
import os, sys
from maxpipe import train
from maxpipe.config import ConfigError, Problem
from maxpipe.data.loader import Loader

original, calls = Loader.__next__, []

def next_batch(self):
    calls.append(None)
    is_bad = len(calls) == int(os.environ["BAD_BATCH"])
    if is_bad and os.environ["JAX_PROCESS_ID"] == os.environ["BAD_PROCESS"]:
        raise ConfigError(Problem("data.path", "here.txt is not text"))
    return original(self)

Loader.__next__ = next_batch
sys.exit(train.main(sys.argv[1:]))
"""

A_DISK_OF_ITS_OWN = """
import os, sys
from maxpipe import train

sys.exit(train.main([word.replace("OWN", os.environ["JAX_PROCESS_ID"]) for word in sys.argv[1:]]))
"""


SMALL_FILES_IN_ONE = """
import os, resource, signal, sys
from maxpipe.supervision.ending import run_command
from maxpipe.train import main

if os.environ["JAX_PROCESS_ID"] == os.environ["BAD_PROCESS"]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32_000, 32_000))
run_command(main)
"""

VALUES_OF_ITS_OWN = """
import os, sys
from maxpipe import train

number = os.environ["JAX_PROCESS_ID"]
own = ["seed=1", "steps=7", "model.mlp_dim=48"] if number == "1" else []
own += [f"data.path={os.environ['CORPUS']}{number}"]
keys = {word.split("=")[0] for word in own}
given = [word for word in sys.argv[1:] if word.split("=")[0] not in keys]
sys.exit(train.main(given + own))
"""


# Each process finds files of its own under the same relative names.
FILES_OF_ITS_OWN = """
import os, sys

os.chdir(os.environ["JAX_PROCESS_ID"])
sys.path.insert(0, "")
from maxpipe import train

sys.exit(train.main(sys.argv[1:]))
"""


def train(tmp_path, processes, arguments, name):
    """Start some processes and wait until all have ended."""
    if processes == 1:
        code, output = run(tmp_path / f"{name}.log", arguments)
        codes = [code]
    else:
        with members(tmp_path, processes, arguments, name) as started:
            codes, output = ends(started)
    assert codes == [0] * processes, output
    return output


RESUMED = ("steps=4", "data.source=python_stdlib")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the losses of one process that trains without a stop; schedules do not differ."""
    directory = tmp_path_factory.mktemp("whole")
    train(directory, 1, command(directory, *RESUMED), "whole")
    return losses(directory / "base")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "counts",
    [
        (2, 1),
        pytest.param((1, 2), marks=pytest.mark.grid),
        pytest.param((4, 2), marks=pytest.mark.grid),
    ],
)
def test_train_resumed_with_other_number_of_processes_has_same_losses(
    tmp_path, whole, schedule, counts
):
    parts = command(tmp_path, f"pipeline.schedule={schedule}", *RESUMED)
    output = train(tmp_path, counts[0], [*parts, "stop_after=2"], "before")
    if counts[0] > 1:
        assert f"{counts[0]} processes" in output
    assert checkpoints(tmp_path / "base") == [2]
    assert "resumed after step 2" in train(tmp_path, counts[1], parts, "after")
    parts = losses(tmp_path / "base")
    assert list(whole) == list(parts) == [1, 2, 3, 4]
    for step in whole:
        assert parts[step] == pytest.approx(whole[step], rel=1e-5)


def test_train_sigterm_to_one_process_stops_all_after_same_step(tmp_path):
    words = command(tmp_path, *ENDLESS, "pipeline.schedule=lockstep_1f1b", "checkpoint.every=1")
    with members(tmp_path, 2, words) as started:
        started[0].wait_for("step    3/")
        started[1].send(signal.SIGTERM)
        codes, output = ends(started)
    assert codes == [75, 75], output
    step = max(steps_of(tmp_path))
    assert max(checkpoints(tmp_path / "base")) == step
    assert f"stopped after step {step} of 1000, step {step} is saved" in output


@pytest.mark.grid
def test_train_ctrl_c_in_one_process_stops_all(tmp_path):
    with members(tmp_path, 2, command(tmp_path, *ENDLESS)) as started:
        started[0].wait_for("step    2/")
        started[0].send(signal.SIGINT)
        codes, output = ends(started)
    assert codes == [130, 75], output
    assert checkpoints(tmp_path / "base") == [max(steps_of(tmp_path))]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.grid)])
def test_train_lost_process_ends_others_and_same_command_continues(tmp_path, victim):
    words = command(tmp_path, *ENDLESS, "checkpoint.every=2")
    with members(tmp_path, 2, words) as started:
        started[0].wait_for("step    5/")
        killed_at = time.monotonic()
        started[victim].send(signal.SIGKILL)
        codes, output = ends(started)
        assert time.monotonic() - killed_at < HEARTBEAT + 15
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] in (-signal.SIGABRT, 134), output  # the same in a shell
    newest = max(checkpoints(tmp_path / "base"))
    assert newest >= 2
    output = train(tmp_path, 2, [*words, f"stop_after={newest + 1}"], "again")
    assert f"resumed after step {newest}" in output
    assert sorted(steps_of(tmp_path)) == list(range(1, newest + 2))


@pytest.mark.slow
def test_train_error_in_one_process_is_printed_and_ends_all(tmp_path):
    with members(tmp_path, 2, command(tmp_path, *ENDLESS), program=ONE_FAILS) as started:
        codes, output = ends(started)
    assert codes == [1, 1], output
    assert "RuntimeError: the third batch is bad" in started[1].output
    assert "error in process 1: the third batch is bad" in started[0].output


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.grid)])
def test_train_config_error_in_one_process_ends_all_with_2(tmp_path, monkeypatch, bad):
    monkeypatch.setenv("BAD_PROCESS", str(bad))
    monkeypatch.setenv("BAD_BATCH", "3")
    words = command(tmp_path, *ENDLESS, "checkpoint.every=0", "checkpoint.every_minutes=1e-6")
    with members(tmp_path, 2, words, program=BAD_DATA_IN_ONE) as started:
        started[bad].wait_for("config error")
        found_at = time.monotonic()
        codes, output = ends(started)
        assert time.monotonic() - found_at < HEARTBEAT / 2
    assert codes == [2, 2], output
    assert "config error: data.path: here.txt is not text" in started[bad].output
    assert (
        f"config error in process {bad}: data.path: here.txt is not text" in started[1 - bad].output
    )
    assert "Traceback" not in output
    assert max(checkpoints(tmp_path / "base")) == 2


def test_train_config_error_in_all_processes_is_printed_by_all(tmp_path):
    words = command(tmp_path, "data.source=text", f"data.path={tmp_path}/nowhere")
    with members(tmp_path, 2, words) as started:
        codes, output = ends(started)
    assert codes == [2, 2], output
    # A process that is a second later learns of the error from the other one.
    shown = re.compile(r"config error(?: in process \d)?: data\.path")
    assert all(shown.search(process.output) for process in started), output


def test_members_are_killed_if_test_fails(tmp_path):
    forever = "import time; print('here', flush=True); time.sleep(600)"
    with pytest.raises(RuntimeError), members(tmp_path, 2, [], program=forever) as started:  # noqa: PT012
        for process in started:
            process.wait_for("here")
        raise RuntimeError
    assert [process.wait() for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.grid
def test_train_unshared_output_dir_exits_with_2(tmp_path):
    with members(
        tmp_path, 2, command(tmp_path / "OWN", *ENDLESS), program=A_DISK_OF_ITS_OWN
    ) as started:
        codes, output = ends(started)
    assert codes == [2, 2], output
    assert "output_dir: not all processes see the same" in output


def test_train_different_configurations_exit_with_2_and_name_keys_and_processes(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CORPUS", str(tmp_path / "corpus"))
    for number in (0, 1):
        directory = tmp_path / f"corpus{number}"
        directory.mkdir()
        (directory / "a.jsonl").write_text(f'{{"text": "{number}"}}\n' * 9)
    words = command(tmp_path, *ENDLESS, "seed=0", "data.source=jsonl")
    with members(tmp_path, 2, words, program=VALUES_OF_ITS_OWN) as started:
        codes, output = ends(started)
    assert codes == [2, 2], output
    for process in started:
        for key, values in (("seed", (0, 1)), ("steps", (1000, 7)), ("model.mlp_dim", (32, 48))):
            sides = "{} in process 0; {} in process 1".format(*values)
            assert f"{key}: the processes of this run differ: {sides}" in process.output
        assert "data.path: the processes of this run differ: " in process.output
        assert "corpus0" not in process.output, "contents are compared, not paths"
    assert not (tmp_path / "base").exists()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.grid)])
def test_train_failed_save_in_one_process_ends_all_with_1(tmp_path, monkeypatch, bad):
    monkeypatch.setenv("BAD_PROCESS", str(bad))
    words = command(tmp_path, *ENDLESS, "checkpoint.every=3")
    with members(tmp_path, 2, words, program=SMALL_FILES_IN_ONE) as started:
        started[0].wait_for("step    3/")
        saved_at = time.monotonic()
        codes, output = ends(started)
        assert time.monotonic() - saved_at < 60
    assert codes == [1, 1], output
    assert "error: saving checkpoint" in started[bad].output
    assert f"error in process {bad}: saving checkpoint" in started[1 - bad].output
    assert checkpoints(tmp_path / "base") == []


@pytest.mark.slow
def test_train_files_of_the_same_name_with_other_contents_exit_with_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (0, 1):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "table.csv").write_text(("F0,F1,B0,B1\n" * 2, "F0,B0,F1,B1\n" * 2)[number])
        (directory / "mine.py").write_text(
            "import optax\n"
            "from maxpipe.config.catalog import OPTIMIZERS, Optimizer\n"
            "OPTIMIZERS['mine'] = Optimizer('mine:build', moments=0)\n"
            f"def build(config):\n    return optax.scale({number + 1}.0)\n"
        )
    words = ("pipeline.schedule=table.csv", "--import", "mine", "optimizer.name=mine")
    with members(
        tmp_path, 2, command(tmp_path, *ENDLESS, *words), program=FILES_OF_ITS_OWN
    ) as started:
        codes, output = ends(started)
    assert codes == [2, 2], output
    for process in started:
        for name in ("pipeline.schedule", "code of mine"):
            assert f"{name}: the processes of this run differ: " in process.output
    assert not (tmp_path / "base").exists()
