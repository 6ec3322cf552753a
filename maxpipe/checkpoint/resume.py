"""`checkpoint.resume`: which step a run continues from."""

from collections.abc import Sequence

from maxpipe.config.errors import ConfigError, Problem

KEY = "checkpoint.resume"


def choose(resume: str, steps: Sequence[int], place: str = "") -> int | None:
    """The step to continue from, or None to start from initial values.

    `auto` takes the newest step if there is one, `must` insists on one, a number takes exactly that step.
    `never` is refused while committed steps exist: going on would mix two runs under one name, and clearing
    them would destroy work on the strength of one word.

    Args:
      resume: value of `checkpoint.resume`.
      steps: committed steps in any order.
      place: where they lie; named in messages.

    Raises:
      ConfigError: the value is not one of these, or `steps` does not allow it; names `checkpoint.resume`.
    """
    where = f" in {place}" if place else ""
    there = f"committed steps{where}: {', '.join(map(str, sorted(steps))) or 'none'}"
    if resume == "auto":
        return max(steps, default=None)
    if resume == "never":
        if steps:
            raise _refusal(f"never, but there is something ({there}); delete it or choose another run_name")
        return None
    if resume == "must":
        if not steps:
            raise _refusal(f"must, but there is nothing to resume ({there}); check output_dir and run_name")
        return max(steps)
    if not (resume.isascii() and resume.isdecimal()):
        raise _refusal(f"{resume!r} is not auto, never, must or the number of a step")
    if int(resume) not in steps:
        raise _refusal(f"step {int(resume)} does not exist ({there})")
    return int(resume)


def _refusal(message: str) -> ConfigError:
    return ConfigError(Problem(KEY, message))
