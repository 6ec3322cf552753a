"""Which step a start continues from, and what marks tell an attempt of a job that goes back."""

import numpy as np
import pytest

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.record import Record
from maxpipe.checkpoint.replicas import Replicas
from maxpipe.checkpoint.steps import followed, step_since, step_to_resume
from maxpipe.config import CheckpointConfig, Config, ConfigError, replace
from maxpipe.training.resuming import followed_once, step_to_continue


@pytest.mark.parametrize(
    ("resume", "steps", "result"),
    [
        *(("auto", [], None), ("never", [], None), ("auto", [10, 30, 20], 30)),
        *(("must", [10, 20], 20), ("10", [10, 20], 10), ("0", [0, 10], 0)),
        ("must", [], "nothing to resume; check output_dir and run_name"),
        ("never", [10, 20], "delete them or choose another run"),
        ("15", [20, 10], "step 15 does not exist (committed steps in runs/a: 10, 20)"),
    ],
)
def test_step_to_resume_is_the_one_asked_for_or_refused_with_the_steps(resume, steps, result):
    if not isinstance(result, str):
        assert step_to_resume(resume, steps, "runs/a") == result
        return
    with pytest.raises(ConfigError) as caught:
        step_to_resume(resume, steps, "runs/a")
    (problem,) = caught.value.problems
    assert problem.key == "checkpoint.resume"
    assert result in problem.message


MARK, DAMAGED = followed("10", ("job", 1)), CheckpointDamaged("runs/a/10", "no record")


def since(metas, resume="10", job=("job", 2)):

    def record_of(step):
        if isinstance(metas[step], Exception):
            raise metas[step]
        return Record(step, metas[step], {})

    return step_since(resume, job, metas, record_of)


def test_step_since_is_the_newest_one_if_an_earlier_attempt_has_written_it():
    assert MARK == {"followed": {"resume": "10", "job": "job", "attempt": 1}}
    assert since({10: {}, 30: MARK, 20: MARK}) == 30
    never = followed("never", ("job", 1))
    assert since({10: {}, 30: never}, "never") == 30
    assert since({10: {}, 20: MARK, 30: DAMAGED}) == 20
    for metas in [
        {},
        {10: {}, 20: MARK, 30: {}},  # steps of before are ahead
        {10: {}, 20: DAMAGED},
        *({10: {}, 20: followed(*of)} for of in [("20", ("job", 1)), ("never", ("job", 1))]),
        *({10: {}, 20: followed("10", job)} for job in [("other", 1), ("job", 2)]),
    ]:
        assert since(metas) is None

    unreadable = {20: CheckpointUnreadable("runs/a/20", "no permission")}
    assert since(unreadable, job=("", 0)) is None  # without a job no record is read
    assert followed("auto", ("job", 2)) == followed("must", ("job", 2)) == {}
    assert since(unreadable, resume="auto") is None
    with pytest.raises(CheckpointUnreadable):
        since(unreadable)


def test_followed_once_continues_from_what_a_job_has_saved_or_replicated(tmp_path):
    def open_again():
        replicas = Replicas(tmp_path / "memory", tmp_path / "checkpoints", 1)
        return Checkpointer(tmp_path / "checkpoints", CheckpointConfig(every=2), replicas=replicas)

    mark, rows, said = followed("2", ("job", 1)), np.zeros((1, 3), np.int64), []
    for name, steps in (("save", {2: {}, 4: mark}), ("replicate", {5: mark})):
        checkpointer = open_again()
        for step, meta in steps.items():
            getattr(checkpointer, name)(step, {"a": rows}, rows, {"config": {}} | meta)
        checkpointer.close()
    for resume, attempt, expected in (("2", 1, ("2", 2)), ("2", 2, ("auto", 5))):
        config = replace(Config(), **{"checkpoint.resume": resume})
        checkpointer = open_again()
        config = followed_once(config, checkpointer, ("job", attempt), said.append)
        assert (config.checkpoint.resume, step_to_continue(config, checkpointer)) == expected
    assert " ".join(said) == (
        "checkpoint.resume=2 was followed by an earlier attempt of this job, which has "
        "reached step 5: this one continues from the newest step"
    )
