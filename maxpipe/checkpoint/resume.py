"""Follow `checkpoint.resume`: choose the step that a start continues from. Imports no JAX.

The number of a step, or `never`, is obeyed once per job, not again in each of its attempts: a run
that loses processes faster than it can get past its newest step would never end. So a start that
obeys one marks all checkpoints that it writes, and a later attempt whose newest step has the mark
continues from that step.
"""

from collections.abc import Callable, Iterable, Sequence

from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.record import Record
from maxpipe.config.errors import ConfigError, Problem

RESUME = "checkpoint.resume"
AUTO = "auto"
NEWEST = (AUTO, "must")  # values that take the newest step
FOLLOWED = "followed"  # in a checkpoint's meta

Job = tuple[str, int]  # name ("" without a job) and number of the attempt


def step_to_resume(resume: str, steps: Sequence[int], place: str) -> int | None:
    """Return the step to continue from, or None to start from initial values.

    `auto` takes the newest of the committed steps if there is one, `must` requires one, and a
    number takes exactly that step. `never` is refused while there are any: continuing would mix two
    runs under one name, and deleting the steps because of one word would destroy work.

    Raises:
      ConfigError: `steps`, in `place`, do not allow it.
    """
    existing = f"committed steps in {place}: {', '.join(map(str, sorted(steps))) or 'none'}"
    refusal = ""
    if resume == "never" and steps:
        refusal = f"never, but there are {existing}; delete them or choose another run_name"
    elif resume == "must" and not steps:
        refusal = (
            f"must, but there is nothing to resume ({existing}); check output_dir and run_name"
        )
    elif resume.isdecimal() and int(resume) not in steps:
        refusal = f"step {int(resume)} does not exist ({existing})"
    if refusal:
        raise ConfigError(Problem(RESUME, refusal))
    return int(resume) if resume.isdecimal() else max(steps, default=None)


def followed(resume: str, job: Job) -> dict[str, dict[str, str | int]]:
    """Return the mark, if any: what a start adds to the meta of its checkpoints."""
    name, attempt = job
    if not name or resume in NEWEST:
        return {}
    return {FOLLOWED: {"resume": resume, "job": name, "attempt": attempt}}


def step_since(
    resume: str, job: Job, steps: Iterable[int], record_of: Callable[[int], Record]
) -> int | None:
    """Return the newest step if an earlier attempt of this job, with this `resume`, has written it.

    Damaged records are skipped, as a restore would skip them. `steps` are those that the run could
    continue from, in any order.

    Raises:
      CheckpointUnreadable: a record cannot be read here.
    """
    if not followed(resume, job):
        return None
    for step in sorted(steps, reverse=True):
        try:
            mark = record_of(step).meta.get(FOLLOWED, {})
        except CheckpointDamaged:
            continue
        is_same = mark and (mark["resume"], mark["job"]) == (resume, job[0])
        return step if is_same and mark["attempt"] < job[1] else None
    return None
