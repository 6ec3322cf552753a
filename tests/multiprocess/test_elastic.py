"""A supervised run that goes on without a lost host, and with it again when it is back."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.runs import losses, rows
from helpers.training_process import (
    DEADLINE_SECONDS,
    ONE_LAYER,
    SUPERVISED,
    TrainingProcess,
    command,
    ended,
    members,
    run,
    trainer_of,
)


def words(directory, *more):
    mesh = ("mesh.simulated_devices=2", "mesh.ici.data=2", "mesh.heartbeat_timeout_seconds=600")
    elastic = ("mesh.elastic.axes=[data,fsdp]", "mesh.elastic.wait_seconds=1")
    # So that rounding does not grow over the steps.
    rate = (
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1e-4",
    )
    other = ("steps=100000", "model.dtype=float32", "data.source=python_stdlib")
    return command(directory, *mesh, *elastic, *ONE_LAYER, *rate, *other, *more)


def place_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    named = dict(variable.partition("=")[::2] for variable in variables)
    return {name: value for name, value in named.items() if name.startswith("JAX_")}


def train_on(process, directory, steps):
    until = time.monotonic() + DEADLINE_SECONDS
    last = max(losses(directory / "base")) + steps
    while max(losses(directory / "base")) < last:
        assert not process.has_ended, process.output
        assert time.monotonic() < until, process.output
        time.sleep(0.05)


def compiled_steps(output):
    attempts = output.split("starts attempt")[1:]
    return [attempt.count("Finished XLA compilation of jit(train_step)") for attempt in attempts]


@pytest.mark.grid
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_train_elastic_goes_on_without_a_lost_host_and_grows_when_it_is_back(
    tmp_path, axis, monkeypatch
):
    mesh = ("mesh.ici.data=1", "mesh.ici.fsdp=1", f"mesh.ici.{axis}=2")
    # With data parallelism the disk has nothing at first, so that replicas have to do.
    every = 50 if axis == "fsdp" else 100_000
    replicas = ("checkpoint.replica_every=10", f"checkpoint.every={every}")
    arguments = words(tmp_path, *mesh, *replicas)
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    with members(tmp_path, 2, arguments, program=SUPERVISED) as (first, lost):
        first.wait_for(" 80/")
        first.wait_for("the step for 1 of 2 processes was compiled ahead in")
        place = place_of(lost.pid)
        os.kill(lost.pid, signal.SIGKILL)  # and with it its trainer, and all that is in memory
        first.wait_for("with 1 of 2 processes (0): process 1 has not come back in 1 s")
        first.wait_for(f"mesh.ici.{axis}=1,pipeline.num_microbatches=2: 1 of 2 processes go on")
        train_on(first, tmp_path, 20)
        with TrainingProcess(tmp_path / "back.log", arguments, place, SUPERVISED) as back:
            first.wait_for("saves, to go on with 2 of 2 processes")
            first.wait_for(f": mesh.ici.{axis} 1 -> 2")
            (grown,) = re.findall(rf"since step (\d+): mesh.ici.{axis} 1 -> 2", first.output)
            train_on(first, tmp_path, 10)
            trainer_of(back.pid)
            first.send(signal.SIGTERM)
            output = ended([first, back], [75, 75])
    # Data parallel processes have all of a state in memory; otherwise the disk has the last one.
    assert ("is restored from replicas in memory" in first.output) == (axis == "data"), output
    whole, alone, again = compiled_steps(first.output)
    # The step of the second attempt was compiled ahead; the third may end before it does so again.
    assert (whole, alone) == (2, 0), output
    assert again in (1, 2), output
    account = [row for row in rows(tmp_path / "base") if "goodput" in row][-1]
    assert "seconds_in_restart" in account

    steps = int(grown) + 10
    alone = ("mesh.simulated_devices=1", "mesh.ici.data=1", f"stop_after={steps}")
    undisturbed = (*words(tmp_path, *alone), "mesh.elastic.axes=[]", "run_name=whole")
    code, output = run(tmp_path / "whole.log", undisturbed)
    assert code == 0, output
    expected = {step: values[0] for step, values in losses(tmp_path / "whole").items()}
    reached = {step: values[0] for step, values in losses(tmp_path / "base").items()}
    assert {step: loss for step, loss in reached.items() if step <= steps} == pytest.approx(
        expected, rel=1e-5
    )
