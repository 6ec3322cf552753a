"""A supervised run of several processes, whose trainers are killed and stopped from outside."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers.runs import assert_same_run, losses, rows
from helpers.training_process import (
    ONE_LAYER,
    SUPERVISED,
    command,
    ended,
    members,
    output_of,
    run,
    trainer_of,
)

from maxpipe.supervise import __main__ as supervise

STEPS = 800  # a quick machine takes 10 ms for one, and a trainer is lost after step 300


def words(directory, *more):
    mesh = ("mesh.simulated_devices=2", "mesh.ici.data=2", "data.source=python_stdlib")
    waits = ("mesh.heartbeat_timeout_seconds=600", "telemetry.step_deadline_seconds=15")
    here = (f"steps={STEPS}", "checkpoint.every=50", *mesh, *ONE_LAYER, *waits)
    return command(directory, *here, *more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    output_of(directory, words(directory, "run_name=whole"), [0, 0])
    return directory / "whole"


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_train_supervised_ends_in_the_same_bits_when_one_trainer_is_lost(
    tmp_path, capsys, undisturbed, victim, number
):
    with members(tmp_path, 2, words(tmp_path), program=SUPERVISED) as started:
        started[0].wait_for(" 300/")
        os.kill(trainer_of(started[victim].pid), number)
        output = ended(started, [0, 0])
    assert [*losses(tmp_path / "base")] == [*range(1, STEPS + 1)]
    account = [row for row in rows(tmp_path / "base") if "goodput" in row][-1]
    assert account["seconds_in_restart"] > 0
    assert account["seconds_in_restore"] >= 0  # milliseconds on a quick machine
    assert "resumed after step " in output
    assert (account["seconds_in_detection"] > 14) == (number == signal.SIGSTOP)

    assert supervise.main(["--status", str(tmp_path / "base")]) == 0
    shown = capsys.readouterr().out
    assert "base has ended with exit code 0" in shown
    assert f"step        {STEPS}" in shown
    assert f"checkpoint  {STEPS}" in shown
    assert "restarts    1; the last attempt: process " in shown

    assert_same_run(tmp_path / "base", undisturbed, STEPS)


def test_train_supervised_goes_on_when_process_0_is_killed(tmp_path):
    endless = words(tmp_path, "steps=100000", "stop_after=250", "checkpoint.every=20")
    with members(tmp_path, 2, endless, program=SUPERVISED) as started:
        started[0].wait_for(" 100/")
        os.kill(trainer_of(started[0].pid), signal.SIGKILL)
        output = ended(started, [0, 0])
    assert "resumed after step " in output
    assert [*losses(tmp_path / "base")] == [*range(1, 251)]


def memory_of(trainer):
    variables = Path(f"/proc/{trainer}/environ").read_text().split("\0")
    (own,) = [v.partition("=")[2] for v in variables if v.startswith("MAXPIPE_MEMORY=")]
    return Path(own).parent


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_train_supervised_goes_on_from_the_replicas_in_memory(tmp_path, count):
    many = words(
        tmp_path,
        "steps=300",
        "checkpoint.every=100",
        "checkpoint.replica_every=10",
        f"mesh.ici.data={count}",
        f"mesh.simulated_devices={count}",
    )
    with members(tmp_path, count, many, program=SUPERVISED) as started:
        started[0].wait_for(" 180/")
        trainers = [trainer_of(process.pid) for process in started]
        memories = {memory_of(trainer) for trainer in trainers}
        assert len(memories) == count
        assert all(memory.is_dir() for memory in memories)
        os.kill(trainers[-1], signal.SIGKILL)
        output = ended(started, [0] * count)
    resumed = re.search(r"resumed after step (\d+)", output)
    assert resumed is not None, output
    assert int(resumed[1]) >= 160, "not from the newest replica that all had"
    assert int(resumed[1]) % 10 == 0
    assert not any(memory.exists() for memory in memories)
    assert "is restored from replicas in memory; safe: step 100 in " in output
    assert re.search(r"replica_every=10: replicas take [\d,]+ bytes of the memory of each", output)

    output_of(tmp_path, [*many, "run_name=whole"], [0] * count, "whole", SUPERVISED)
    assert_same_run(tmp_path / "base", tmp_path / "whole", 300)


@pytest.mark.slow
def test_train_with_replicas_and_no_supervisor_is_refused(tmp_path):
    code, output = run(tmp_path / "log", words(tmp_path, "checkpoint.replica_every=10"))
    assert code == 2
    assert "checkpoint.replica_every: replicas lie in the memory of a supervisor" in output


@pytest.mark.slow
def test_train_supervised_asked_to_stop_saves_and_does_not_restart(tmp_path):
    with members(tmp_path, 2, words(tmp_path, "steps=100000"), program=SUPERVISED) as started:
        started[0].wait_for(" 300/")
        started[1].send(signal.SIGTERM)
        output = ended(started, [75, 75])
    assert f"step {max(losses(tmp_path / 'base'))} is saved" in output
