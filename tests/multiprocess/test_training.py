"""One run as several processes, with the pipeline's stages in different ones."""

import signal
import time

import pytest
from helpers.runs import checkpoints, last_words, losses
from helpers.training_process import (
    DEADLINE_SECONDS,
    command,
    ended,
    ends,
    members,
    output_of,
    run,
    steps_of,
)

from maxpipe import train as command_line

HEARTBEAT = 10
ENDLESS = ("steps=1000", "checkpoint.every=1000", f"mesh.heartbeat_timeout_seconds={HEARTBEAT}")

ONE_FAILS = """
import os, resource, signal, sys
from maxpipe.config import ConfigError, Problem
from maxpipe.data.loader import Loader
from maxpipe.supervise.ending import run_command
from maxpipe.train import main

ERRORS = {
    "error": RuntimeError("the third batch is bad"),
    "config error": ConfigError(Problem("data.path", "here.txt is not text")),
}
fault = os.environ["FAULT"]
original, calls = Loader.__next__, []

def next_batch(self):
    calls.append(None)
    if len(calls) == 3 and fault in ERRORS:
        raise ERRORS[fault]
    return original(self)

if os.environ["JAX_PROCESS_ID"] == os.environ["BAD_PROCESS"]:
    Loader.__next__ = next_batch
    if fault == "small files":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (32_000, 32_000))
run_command(main)
"""

A_DISK_OF_ITS_OWN = """
import os, sys
from maxpipe import train

sys.exit(train.main([word.replace("OWN", os.environ["JAX_PROCESS_ID"]) for word in sys.argv[1:]]))
"""

# Other values and another version in process 1, and other files under the same relative names.
EVERYTHING_OF_ITS_OWN = """
import os, sys

number = os.environ["JAX_PROCESS_ID"]
os.chdir(number)
sys.path.insert(0, "")
import maxpipe
from maxpipe import train

own = []
if number == "1":
    maxpipe.__version__ = "0.0.1"
    own = ["seed=1", "steps=7", "model.mlp_dim=48"]
keys = {word.split("=")[0] for word in own}
sys.exit(train.main([word for word in sys.argv[1:] if word.split("=")[0] not in keys] + own))
"""


def train(tmp_path, processes, arguments, name):
    if processes > 1:
        return output_of(tmp_path, arguments, [0] * processes, name)
    code, output = run(tmp_path / f"{name}.log", arguments)
    assert code == 0, output
    return output


RESUMED = ("steps=4", "data.source=python_stdlib")
HERE = ("mesh.simulated_devices=0", "mesh.ici.fsdp=4")  # in this process


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    assert command_line.main(command(directory, *RESUMED, *HERE)) == 0
    return losses(directory / "base")


def test_train_sigterm_to_one_process_stops_all_and_one_process_goes_on_with_the_same_losses(
    tmp_path, capsys
):
    words = (*ENDLESS, "pipeline.schedule=lockstep_1f1b", "data.source=python_stdlib")
    parts = command(tmp_path, *words, "checkpoint.every=1", "checkpoint.keep=3")
    with members(tmp_path, 2, parts) as started:
        started[0].wait_for("step    3/")
        # Each process answers for itself, and goes on.
        started[1].send(signal.SIGUSR1)
        started[1].wait_for("(most recent call first):")
        started[1].send(signal.SIGUSR2)
        until = time.monotonic() + DEADLINE_SECONDS
        while not list((tmp_path / "base" / "profile").rglob("*.xplane.pb")):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert "SIGUSR2" not in started[0].output
        started[1].send(signal.SIGTERM)
        output = ended(started, [75, 75])
    assert "2 processes" in output
    step = max(steps_of(tmp_path))
    assert max(checkpoints(tmp_path / "base")) == step
    assert f"stopped after step {step} of 1000, step {step} is saved" in output
    end = f"stop_after={step + 2}"
    assert command_line.main(last_words([*parts, *HERE, end])) == 0
    assert f"resumed after step {step}" in capsys.readouterr().out
    assert command_line.main(command(tmp_path / "whole", *words, *HERE, end)) == 0
    found, whole = losses(tmp_path / "base"), losses(tmp_path / "whole" / "base")
    assert list(found) == list(whole) == list(range(1, step + 3))
    for number in whole:
        assert found[number] == pytest.approx(whole[number], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["circular", "lockstep_1f1b"])
@pytest.mark.parametrize("counts", [(2, 1), pytest.param((4, 2), marks=pytest.mark.grid)])
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
@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.grid)])
@pytest.mark.parametrize(
    ("fault", "code", "own", "message", "saved"),
    [
        ("error", 1, "RuntimeError: ", "the third batch is bad", [2]),
        ("config error", 2, "config error: ", "data.path: here.txt is not text", [2]),
        ("small files", 1, "error: ", "saving checkpoint", []),
    ],
)
def test_train_fault_in_one_process_is_said_by_all_and_ends_them_with_its_code(
    tmp_path, monkeypatch, bad, fault, code, own, message, saved
):
    monkeypatch.setenv("BAD_PROCESS", str(bad))
    monkeypatch.setenv("FAULT", fault)
    words = command(tmp_path, *ENDLESS, "checkpoint.every=2")
    with members(tmp_path, 2, words, program=ONE_FAILS) as started:
        started[bad].wait_for(message)
        found_at = time.monotonic()
        codes, output = ends(started)
        assert time.monotonic() - found_at < (60 if fault == "small files" else HEARTBEAT / 2)
    assert codes == [code, code], output
    assert f"{own}{message}" in started[bad].output
    assert f"error in process {bad}: {message}" in started[1 - bad].output
    assert checkpoints(tmp_path / "base") == saved
    if code == 2:
        assert "Traceback" not in output


@pytest.mark.grid
def test_train_unshared_output_dir_exits_with_2(tmp_path):
    output = output_of(
        tmp_path, command(tmp_path / "OWN", *ENDLESS), [2, 2], program=A_DISK_OF_ITS_OWN
    )
    assert "output_dir: not all processes see the same" in output


def test_train_started_otherwise_in_one_process_exits_with_2_and_names_keys_and_processes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for number in (0, 1):
        directory = tmp_path / str(number)
        (directory / "corpus").mkdir(parents=True)
        (directory / "corpus" / "a.jsonl").write_text(f'{{"text": "{number}"}}\n' * 9)
        (directory / "table.csv").write_text(("F0,F1,B0,B1\n" * 2, "F0,B0,F1,B1\n" * 2)[number])
        (directory / "mine.py").write_text(
            "import optax\n"
            "from maxpipe.config.catalog import OPTIMIZERS, Optimizer\n"
            "OPTIMIZERS['mine'] = Optimizer('mine:build', moments=0)\n"
            f"def build(config):\n    return optax.scale({number + 1}.0)\n"
        )
    data = ("seed=0", "data.source=jsonl", "data.path=corpus")
    own = ("pipeline.schedule=table.csv", "--import", "mine", "optimizer.name=mine")
    words = command(tmp_path, *ENDLESS, *data, *own)
    with members(tmp_path, 2, words, program=EVERYTHING_OF_ITS_OWN) as started:
        ended(started, [2, 2])
    for process in started:
        for key, values in (("seed", (0, 1)), ("steps", (1000, 7)), ("model.mlp_dim", (32, 48))):
            sides = "{} in process 0; {} in process 1".format(*values)
            assert f"{key}: the processes of this run differ: {sides}" in process.output
        for key in ("data.path", "pipeline.schedule", "code of mine", "version of maxpipe"):
            assert f"{key}: the processes of this run differ: " in process.output
    assert not (tmp_path / "base").exists()
