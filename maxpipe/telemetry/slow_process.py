"""Name the process whose stages take much longer than the others'.

All processes of a pipeline take equally long for a step, so its time does not show which of them
the others wait for. `stage_seconds` does: the time of each stage without its waiting.
"""

from collections.abc import Sequence
from statistics import median

FACTOR = 2.0  # a slow process takes this many times as long as the others
LEAST_SECONDS = 0.02  # and this much longer: a host's time for logging does not matter
STEPS = 5  # steps in a row before a process is called slow, and before it no longer is


class SlowProcess:
    """Watches the stages of a run, and reports when their processes begin or cease to be slow.

    A stage with more layers may be what is slow: the others wait for it all the same. The first
    step of a process compiles, and is left out.

    Args:
      processes: for each stage, the processes that hold it.
    """

    def __init__(self, processes: Sequence[frozenset[int]]):
        self._processes = processes
        self._is_first = True
        self._named: frozenset[int] | None = None
        self._suspect: frozenset[int] | None = None
        self._steps = 0  # in a row with this suspect

    def after_step(self, step: int, seconds: Sequence[float]) -> str | None:
        """Return a line to print after a step, given the seconds of each stage."""
        if self._is_first:
            self._is_first = False
            return None
        slow, own, others = self._slowest(seconds)
        is_slow = own > max(FACTOR * others, others + LEAST_SECONDS)
        suspect = slow if is_slow else None
        self._steps = self._steps + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._steps < STEPS or suspect == self._named:
            return None
        before, self._named = self._named, suspect
        if suspect is None:
            assert before is not None
            return f"step {step}: {_name(before)} no longer slow"
        return (
            f"warning: {_name(suspect)} slow: without waiting for others, step {step} took "
            f"{own:.3g} s there and {others:.3g} s elsewhere; if the hosts are equally fast, "
            "pipeline.layers_per_stage=auto evens the stages out; otherwise look at that host. "
            "stage_seconds in metrics.jsonl has all stages"
        )

    def _slowest(self, seconds: Sequence[float]) -> tuple[frozenset[int], float, float]:
        """Return the slowest processes, their time, and the median of the others' times."""
        times: dict[frozenset[int], float] = {}
        for holders, of_stage in zip(self._processes, seconds, strict=True):
            times[holders] = max(times.get(holders, 0.0), of_stage)
        slow = max(times, key=lambda holders: times[holders])
        return slow, times[slow], median(t for holders, t in times.items() if holders != slow)


def _name(processes: frozenset[int]) -> str:
    numbers = ", ".join(map(str, sorted(processes)))
    return f"process {numbers} is" if len(processes) == 1 else f"processes {numbers} are"
