"""What the marks in checkpoints tell an attempt of a job that is asked to go back."""

import pytest

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.policies import followed, step_since
from maxpipe.checkpoint.record import Record


def records(metas):
    """Return what reads the records of steps; one that is an error is raised instead."""

    def record_of(step):
        if isinstance(metas[step], Exception):
            raise metas[step]
        return Record(step, metas[step], {})

    return record_of


def since(metas, resume="10", job=("job", 2)):
    return step_since(resume, job, metas, records(metas))


def test_followed_value_of_a_job_is_in_the_meta_and_others_are_not():
    assert followed("10", ("job", 2)) == {"followed": {"resume": "10", "job": "job", "attempt": 2}}
    assert followed("never", ("job", 2))["followed"]["resume"] == "never"
    assert followed("auto", ("job", 2)) == followed("must", ("job", 2)) == {}
    assert followed("10", ("", 0)) == {}


def test_step_since_is_the_newest_one_if_an_earlier_attempt_has_written_it():
    for resume in ["10", "never"]:
        earlier = followed(resume, ("job", 1))
        assert since({10: {}, 30: earlier, 20: earlier}, resume) == 30


def test_step_since_of_another_request_is_none():
    for resume, job in [
        ("20", ("job", 1)),
        ("never", ("job", 1)),
        ("10", ("other", 1)),
        ("10", ("job", 2)),
    ]:
        assert since({10: {}, 20: followed(resume, job)}) is None


def test_step_since_is_none_while_steps_of_before_are_ahead():
    assert since({10: {}, 20: followed("10", ("job", 1)), 30: {}}) is None
    assert since({}) is None


def test_step_since_without_a_job_or_with_the_newest_step_reads_no_record():
    metas = {20: CheckpointUnreadable("no permission")}
    assert since(metas, job=("", 0)) is None
    assert since(metas, resume="auto") is None
    with pytest.raises(CheckpointUnreadable):
        since(metas)


def test_step_since_passes_over_damaged_records():
    earlier = followed("10", ("job", 1))
    damaged = CheckpointDamaged("no record")
    assert since({10: {}, 20: earlier, 30: damaged}) == 20
    assert since({10: {}, 20: damaged}) is None
