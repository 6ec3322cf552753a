"""Follow `checkpoint.resume` = a step or `never` once in a job, not again in each of its attempts.

A launcher starts a job again with the same command, after a process was lost. If every such start
went back, a run that loses processes more often than it needs to pass its newest step would never
end. So each checkpoint, and each replica, of a start with such a value says which attempt of which
job has written it, and what the job was asked for. An attempt that finds this in the newest step
continues from there. Imports no JAX.
"""

from collections.abc import Callable, Iterable

from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.policies import NEWEST
from maxpipe.checkpoint.record import Record

FOLLOWED = "followed"  # in a checkpoint's meta
_RESUME, _JOB, _ATTEMPT = "resume", "job", "attempt"

Job = tuple[str, int]  # name, "" without a job, and number of the attempt


def followed(resume: str, job: Job) -> dict[str, dict[str, str | int]]:
    """Return what the meta of a start's checkpoints says of the value that it follows.

    Args:
      resume: `checkpoint.resume`, as the job was asked for.
      job: of this process.
    """
    name, attempt = job
    if not name or resume in NEWEST:
        return {}
    return {FOLLOWED: {_RESUME: resume, _JOB: name, _ATTEMPT: attempt}}


def step_since(
    resume: str, job: Job, steps: Iterable[int], record_of: Callable[[int], Record]
) -> int | None:
    """Return the newest step if an earlier attempt of this job has written it, otherwise None.

    Damaged records are passed over, because a restore would do so as well. Without a job, and with
    values that take the newest step anyway, the answer is None.

    Args:
      resume: `checkpoint.resume`, as the job was asked for.
      job: of this process.
      steps: that the run could continue from, in any order.
      record_of: returns the record of one of them.

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
    """Return whether an earlier attempt of a job has left this mark, asked for the same."""
    if not isinstance(mark, dict) or (mark.get(_RESUME), mark.get(_JOB)) != (resume, job[0]):
        return False
    attempt = mark.get(_ATTEMPT)
    return isinstance(attempt, int) and attempt < job[1]
