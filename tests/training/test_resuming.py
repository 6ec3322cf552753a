"""Which step a start continues from."""

import numpy as np
import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import followed
from maxpipe.checkpoint.replicas import Replicas
from maxpipe.config import Config, replace
from maxpipe.training.resuming import followed_once, step_to_continue


@pytest.fixture
def steps_of_attempts(tmp_path):
    """Return a function that saves and replicates steps with a meta, and opens them again."""

    def make(saved, replicated):
        rows = np.zeros((1, 3), np.int64)
        for steps, name in ((saved, "save"), (replicated, "replicate")):
            checkpointer = open_again()
            for step, meta in steps.items():
                getattr(checkpointer, name)(step, {"a": rows}, rows, {"config": {}} | meta)
            checkpointer.close()
        return open_again()

    def open_again():
        settings = replace(Config(), **{"checkpoint.every": 2}).checkpoint
        replicas = Replicas(tmp_path / "memory", tmp_path / "checkpoints", 1)
        return Checkpointer(tmp_path / "checkpoints", settings, replicas=replicas)

    return make


def continued(resume, checkpointer, attempt=2):
    """Return the value that an attempt follows, its step, and what it says."""
    said = []
    config = replace(Config(), **{"checkpoint.resume": resume})
    config = followed_once(config, checkpointer, ("job", attempt), said.append)
    return config.checkpoint.resume, step_to_continue(config, checkpointer), " ".join(said)


def test_followed_once_continues_from_replicas_after_the_steps_that_a_job_has_saved(
    steps_of_attempts,
):
    mark = followed("2", ("job", 1))
    checkpointer = steps_of_attempts({2: {}, 4: mark}, {5: mark})
    resume, step, said = continued("2", checkpointer)
    assert (resume, step) == ("auto", 5)
    assert said == (
        "checkpoint.resume=2 was followed by an earlier attempt of this job, which has reached "
        "step 5: this one continues from the newest step"
    )
    assert continued("2", checkpointer, attempt=1) == ("2", 2, "")


def test_followed_once_goes_back_again_while_newer_steps_are_not_set_aside(steps_of_attempts):
    checkpointer = steps_of_attempts({2: {}, 8: {}}, {3: followed("2", ("job", 1))})
    assert continued("2", checkpointer) == ("2", 2, "")


def test_followed_once_continues_from_replicas_of_a_job_that_has_saved_nothing(steps_of_attempts):
    checkpointer = steps_of_attempts({}, {1: followed("never", ("job", 1))})
    assert continued("never", checkpointer)[:2] == ("auto", 1)


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_followed_once_leaves_values_that_take_the_newest_step(steps_of_attempts, resume):
    assert continued(resume, steps_of_attempts({2: {}}, {})) == (resume, 2, "")
