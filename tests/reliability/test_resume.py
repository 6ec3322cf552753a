"""A run that was interrupted in any way ends like one that was not."""

import contextlib
import random
import shutil
import signal
import time

import pytest
from helpers.runs import assert_same_run, checkpoints, losses, output_dir, train, write_config
from helpers.training_process import TrainingProcess

from maxpipe.supervise.ending import PREEMPTED

STEPS = 60
EVERY = 10
STOP = 25


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_config(
        tmp_path_factory.mktemp("resume"), steps=STEPS, checkpoint=f"{{every: {EVERY}, keep: 100}}"
    )


@pytest.fixture(scope="module")
def runs(words):
    return output_dir(words)


@pytest.fixture(scope="module")
def uninterrupted(words, runs):
    train([*words, "run_name=uninterrupted"])
    return runs / "uninterrupted"


@pytest.fixture(scope="module")
def stopped(words, runs, uninterrupted):
    said = train([*words, "run_name=stopped", f"stop_after={STOP}"])
    assert f"stopped after step {STOP} of {STEPS}" in said
    return runs / "stopped"


def copy_of(stopped, name):
    shutil.copytree(stopped, stopped.with_name(name))
    return stopped.with_name(name)


def test_train_stop_after_saves_last_step(stopped, uninterrupted):
    assert checkpoints(stopped) == [10, 20, STOP]
    assert losses(stopped) == {step: losses(uninterrupted)[step] for step in range(1, STOP + 1)}


@pytest.mark.parametrize("resume", ["auto", "10"])
def test_train_resumed_from_any_step_is_bit_equal(words, stopped, uninterrupted, resume):
    """The rows of metrics.jsonl after that step are replaced, too."""
    root = copy_of(stopped, f"from-{resume}")
    train([*words, f"run_name=from-{resume}", f"checkpoint.resume={resume}"])
    assert_same_run(root, uninterrupted, STEPS)


def test_train_asked_to_stop_and_then_killed_at_random_is_bit_equal(words, runs, uninterrupted):
    root, command = runs / "killed", [*words, "run_name=killed"]
    with running_to(root, command, 5) as process:
        process.send(signal.SIGTERM)
        assert process.wait() == PREEMPTED, process.output
        saved_step = max(losses(root))
        assert f"stopped after step {saved_step} of {STEPS}, step {saved_step} is" in process.output
    assert checkpoints(root)[-1] == saved_step
    with running_to(root, command, max(saved_step + 1, random.randint(20, 40))) as process:
        assert f"resumed after step {saved_step}" in process.output
        time.sleep(random.uniform(0, 0.05))  # at any moment of a step or a save
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.output
    train(command)
    assert_same_run(root, uninterrupted, STEPS)


@contextlib.contextmanager
def running_to(root, command, step):
    with TrainingProcess(root.with_suffix(".log"), command) as process:
        process.wait_for(f" {step}/{STEPS}  loss")
        yield process


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["pipeline.schedule=circular"], marks=pytest.mark.slow),
        ["pipeline.engine=sequential", "mesh.ici.stage=1", "mesh.ici.fsdp=8"],
    ],
    ids=["circular", "sequential"],
)
def test_train_resumed_in_other_layout_has_same_losses(
    words, stopped, uninterrupted, layout, request
):
    name = request.node.callspec.id
    root = copy_of(stopped, name)
    train([*words, f"run_name={name}", f"stop_after={STOP + 10}", *layout])
    after, expected = losses(root), losses(uninterrupted)
    assert max(after) == STOP + 10
    for step in range(STOP + 1, STOP + 11):
        assert after[step][0] == pytest.approx(expected[step][0], rel=1e-5), step
