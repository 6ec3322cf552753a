"""Obey `checkpoint.resume` = a step or `never` once per job, not again in each of its attempts.

A launcher restarts a job with the same command after a process was lost. If every restart went
back, a run that loses processes faster than it can get past its newest step would never end. So
with such a value each checkpoint and each replica records which attempt of which job wrote it, and
the value. A later attempt that finds this in the newest step continues from there. Imports no JAX.
"""

from collections.abc import Callable, Iterable

from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.policies import NEWEST
from maxpipe.checkpoint.record import Record

FOLLOWED = "followed"  # in a checkpoint's meta
_RESUME, _JOB, _ATTEMPT = "resume", "job", "attempt"

Job = tuple[str, int]  # name ("" without a job) and number of the attempt


def followed(resume: str, job: Job) -> dict[str, dict[str, str | int]]:
    """Return what a start that follows `resume` adds to the meta of its checkpoints.

    Args:
      resume: `checkpoint.resume` as given to the job.
      job: this process's job and attempt.
    """
    name, attempt = job
    if not name or resume in NEWEST:
        return {}
    return {FOLLOWED: {_RESUME: resume, _JOB: name, _ATTEMPT: attempt}}


def step_since(
    resume: str, job: Job, steps: Iterable[int], record_of: Callable[[int], Record]
) -> int | None:
    """Return the newest step if an earlier attempt of this job has written it, otherwise None.

    Damaged records are skipped, as a restore would skip them. The result is None without a job,
    and for values that take the newest step anyway.

    Args:
      resume: `checkpoint.resume` as given to the job.
      job: this process's job and attempt.
      steps: the steps that the run could continue from, in any order.
      record_of: function that returns the record of one of them.

    Raises:
      CheckpointUnreadable: a record cannot be read here.
    """
    if not followed(resume, job):
        return None
    for step in sorted(steps, reverse=True):
        try:
            mark = record_of(step).meta.get(FOLLOWED)
        except CheckpointDamaged:
            continue
        return step if _is_earlier(mark, resume, job) else None
    return None


def _is_earlier(mark: object, resume: str, job: Job) -> bool:
    """Return whether an earlier attempt of the job, with the same `resume`, left this mark."""
    if not isinstance(mark, dict) or (mark.get(_RESUME), mark.get(_JOB)) != (resume, job[0]):
        return False
    attempt = mark.get(_ATTEMPT)
    return isinstance(attempt, int) and attempt < job[1]
