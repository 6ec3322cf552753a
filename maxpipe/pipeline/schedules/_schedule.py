"""Base class of the schedules: sizes and options are checked here, the order of work is the subclass's."""

from abc import ABC, abstractmethod
from typing import ClassVar

from maxpipe.pipeline.schedules._table import ScheduleError, Table


class Schedule(ABC):
    """One family of tables; subclasses register with `SCHEDULES` and are used as classes, never instantiated.

    Attributes:
      engines: engines that run it, preferred one first.
      fixed_repeats: chunks per stage, `pipeline.num_repeats`; None if any number will do.
      delayable: whether `pipeline.delay_activation_forwarding` applies.
      slots_overlap: whether `pipeline.overlap_slots` applies.
    """

    engines: ClassVar[tuple[str, ...]]
    fixed_repeats: ClassVar[int | None] = 1
    delayable: ClassVar[bool] = False
    slots_overlap: ClassVar[bool] = False

    @classmethod
    def name(cls) -> str:
        """The module's name, which is the schedule's."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def repeats_for(cls, num_repeats: int) -> int:
        """`num_repeats`, or what the schedule has instead."""
        return cls.fixed_repeats or num_repeats

    @classmethod
    def build(
        cls,
        num_stages: int,
        num_microbatches: int,
        num_repeats: int = 1,
        *,
        forwarding_delay: int = 1,
        slack: int = 0,
    ) -> Table:
        """Builds the table; it is valid by construction.

        Args:
          num_stages: S, at least 1.
          num_microbatches: M, at least 1; need not be a multiple of S.
          num_repeats: V, chunks per stage, at least 1.
          forwarding_delay: ticks from sending to first use; 2 is `pipeline.delay_activation_forwarding`.
          slack: ticks between the last chunk's F and its B; 1 is `pipeline.overlap_slots`.

        Raises:
          ScheduleError: a size is below 1, or the schedule does not have the option.
        """
        sizes = {
            "mesh.ici.stage": num_stages,
            "pipeline.num_microbatches": num_microbatches,
            "pipeline.num_repeats": num_repeats,
        }
        for key, size in sizes.items():
            if size < 1:
                raise ScheduleError(f"{key}={size}: must be at least 1")
        if num_repeats != cls.repeats_for(num_repeats):
            chunks = "one chunk" if cls.fixed_repeats == 1 else f"{cls.fixed_repeats} chunks"
            raise ScheduleError(
                f"pipeline.num_repeats={num_repeats}: schedule {cls.name()} has {chunks} per stage; "
                f"set it to {cls.fixed_repeats}, or use lockstep_1f1b, interleaved_1f1b or circular"
            )
        if forwarding_delay > 1 and not cls.delayable:
            raise ScheduleError(
                f"pipeline.delay_activation_forwarding=true: schedule {cls.name()} has no fixed ticks to "
                f"delay; set it to false, or use lockstep_1f1b or circular"
            )
        if slack > 0 and not cls.slots_overlap:
            raise ScheduleError(
                f"pipeline.overlap_slots=true: no tick of schedule {cls.name()} has an F and a B slot to "
                f"overlap; set it to false, or use lockstep_1f1b"
            )
        return cls._build(num_stages, num_microbatches, num_repeats, forwarding_delay, slack)

    @classmethod
    @abstractmethod
    def _build(
        cls, num_stages: int, num_microbatches: int, num_repeats: int, forwarding_delay: int, slack: int
    ) -> Table:
        """As `build`, with arguments that were checked."""
