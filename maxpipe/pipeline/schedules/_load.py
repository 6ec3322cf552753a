"""A schedule by name, by file or as configured."""

from functools import partial

from maxpipe.config.layout import num_stages
from maxpipe.config.sections import Config
from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.schedules._csv import load_csv
from maxpipe.pipeline.schedules._table import Table


def is_csv(schedule: str) -> bool:
    """Whether `pipeline.schedule` names a file; no schedule's name ends so."""
    return schedule.endswith(".csv")


def load_schedule(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    *,
    forwarding_delay: int = 1,
    slack: int = 0,
) -> Table:
    """The valid table of a registered schedule, or of a CSV file.

    Args:
      schedule: value of `pipeline.schedule`.
      num_stages, num_microbatches, num_repeats: S, M and V.
      forwarding_delay: 2 with `pipeline.delay_activation_forwarding`, else 1.
      slack: 1 with `pipeline.overlap_slots`, else 0.

    Raises:
      ValueError: there is no such schedule.
      ScheduleError: the sizes or options do not go with it, or the file is no valid schedule.
    """
    build = partial(load_csv, schedule) if is_csv(schedule) else SCHEDULES.get(schedule).build
    return build(num_stages, num_microbatches, num_repeats, forwarding_delay=forwarding_delay, slack=slack)


def build_table(config: Config) -> Table:
    """The schedule's table for a resolved configuration with a pipeline.

    Raises:
      ScheduleError: a CSV file is wrong or of other sizes, or the schedule does not have an option asked for.
    """
    pipeline = config.pipeline
    return load_schedule(
        pipeline.schedule, num_stages(config), pipeline.num_microbatches, pipeline.num_repeats,
        forwarding_delay=2 if pipeline.delay_activation_forwarding else 1, slack=int(pipeline.overlap_slots),
    )  # fmt: skip
