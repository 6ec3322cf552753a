"""Define what the schedule solver is asked for: sizes, placement, times of units, memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from maxpipe.pipeline.schedules.timed_orders import Workload
from maxpipe.plan.simulate import COST_FIELDS, Costs, Simulation

NAME = "solved"  # name of the tables that it finds
_TIMES = (*COST_FIELDS.values(), "communication", "head")
# Called with the seconds since the start, the best makespan and the bound.
Progress = Callable[[float, float, float], None]


@dataclass(frozen=True)
class Task:
    """What to solve.

    Attributes:
      num_stages, num_microbatches, num_repeats, placement: see `Table`.
      lockstep: whether the table is in lockstep; None for whichever is faster.
      max_in_flight: chunks that may be in flight on a stage, at least `num_repeats`.
      costs: times of units of one chunk.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int
    placement: str
    lockstep: bool | None
    max_in_flight: int
    costs: Costs

    @property
    def workload(self) -> Workload:
        """Return the task in the form that the search takes."""
        sizes = self.num_stages, self.num_microbatches, self.num_repeats
        times = self.costs.unit_times(self.num_stages, self.num_repeats, self.placement)
        return Workload(*sizes, self.placement, times, self.max_in_flight)

    @property
    def unit_of_time(self) -> float:
        """Return a power of ten such that the longest of all times is 1 to 10 of it."""
        longest = max(float(np.max(getattr(self.costs, name))) for name in _TIMES)
        return 10.0 ** math.floor(math.log10(longest)) if longest else 1.0

    def in_unit(self, unit: float) -> "Task":
        """Return the task with times in another unit; the search compares them up to rounding."""
        times = {name: (np.asarray(getattr(self.costs, name)) / unit).tolist() for name in _TIMES}
        return replace(self, costs=replace(self.costs, **times))

    def fits(self, run: Simulation) -> bool:
        """Return whether no stage has more chunks in flight than it may."""
        return bool(run.peak_in_flight.max() <= self.max_in_flight)
