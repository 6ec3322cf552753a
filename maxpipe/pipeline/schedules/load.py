"""Load a schedule's table by name, from a CSV file, or as configured; check sizes and options."""

import os

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.imports import OWN_VARIANTS, implementation
from maxpipe.config.rules.layout import chunk_layers, is_csv, misnamed_table, num_stages
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO, nearest
from maxpipe.pipeline.schedules.csv_files import load_csv
from maxpipe.pipeline.schedules.table import ScheduleError, Table
from maxpipe.pipeline.schedules.timed_orders import UnitTimes
from maxpipe.pipeline.schedules.validate import validate


def build_table(config: Config) -> Table:
    """Build the schedule's table for a resolved configuration with a pipeline.

    Raises:
      ScheduleError: a CSV file is wrong or of other sizes, or the schedule does not have an option
        that is on.
    """
    pipeline = config.pipeline
    return load_schedule(
        pipeline.schedule,
        num_stages(config),
        pipeline.num_microbatches,
        pipeline.num_repeats,
        forwarding_delay=pipeline.forwarding_delay,
        slack=int(pipeline.overlap_slots),
        times=times_of_chunks(config),
    )


def is_timed(schedule: str) -> bool:
    return schedule in SCHEDULES and SCHEDULES[schedule].timed


def times_of_chunks(config: Config) -> UnitTimes | None:
    """Return the times of the chunks from `pipeline.unit_times`; None if empty or still auto."""
    pipeline = config.pipeline
    if pipeline.unit_times in ([], AUTO):
        return None
    forward, gradient, weight, communication, head = (*pipeline.unit_times, 0.0, 0.0)[:5]
    if pipeline.layers_per_stage == AUTO:
        chunks = num_stages(config) * pipeline.num_repeats
        sizes = [pipeline.parallel_layers / chunks] * chunks
    else:
        sizes = [float(size) for size in chunk_layers(config)]
    if not ENGINES[pipeline.engine].one_program:
        sizes[0] += config.model.first_dense_layers  # as if they were layers of the first chunk
    of_layer = forward, gradient + weight, gradient, weight
    f, b, i, w = (tuple(time * size for size in sizes) for time in of_layer)
    return UnitTimes(f, b, i, w, communication, head)


def load_schedule(
    schedule: str | os.PathLike[str],
    num_stages: int,
    num_microbatches: int,
    num_repeats: int | None = None,
    *,
    forwarding_delay: int = 1,
    slack: int = 0,
    times: UnitTimes | None = None,
) -> Table:
    """Build the table of a schedule of the catalogue, or read a CSV file's, and validate it.

    Args:
      schedule: value of `pipeline.schedule`, or the path of a CSV file.
      num_stages: S, at least 1.
      num_microbatches: M, at least 1; need not be a multiple of S.
      num_repeats: V, chunks per stage, at least 1; by default the schedule's or the file's own, 1
        where any number is legal.
      forwarding_delay: ticks from sending to first use; 2 is
        `pipeline.delay_activation_forwarding`.
      slack: ticks between the last chunk's F and its B; 1 is `pipeline.overlap_slots`.
      times: times of units, for schedules whose order follows them; others ignore them.

    Raises:
      ValueError: there is no such schedule.
      ScheduleError: it does not support these sizes or options, or the table is invalid.
    """
    schedule = os.fspath(schedule)
    if is_csv(schedule):
        return load_csv(
            schedule,
            num_stages,
            num_microbatches,
            num_repeats,
            forwarding_delay=forwarding_delay,
            slack=slack,
        )
    if num_repeats is None:
        num_repeats = SCHEDULES[schedule].repeats_for(1) if schedule in SCHEDULES else 1
    check_named(schedule, num_stages, num_microbatches, num_repeats, forwarding_delay, slack)
    facts = SCHEDULES[schedule]
    options: dict[str, int | UnitTimes] = {}
    if facts.repeats is None:
        options["num_repeats"] = num_repeats
    if facts.delays:
        options["forwarding_delay"] = forwarding_delay
    if facts.overlaps:
        options["slack"] = slack
    if facts.timed and times:
        options["times"] = times
    table = implementation(facts)(num_stages, num_microbatches, **options)
    given = num_stages, num_microbatches, num_repeats, forwarding_delay, slack
    _check_table(schedule, facts.implementation, table, given)
    return table


def _check_table(
    schedule: str, function: str, table: Table, given: tuple[int, int, int, int, int]
) -> None:
    """Check what a schedule's function returned, which may be a user's.

    Raises:
      ScheduleError: it is no table, not as asked for (stages, microbatches, repeats, delay, slack),
        or invalid.
    """
    if not isinstance(table, Table):
        raise ScheduleError(
            f"pipeline.schedule={schedule}: {function} returned {type(table).__name__}; return a "
            f"Table, such as from_ticks and place make"
        )
    names = ("num_stages", "num_microbatches", "num_repeats", "forwarding_delay", "slack")
    for name, value in zip(names, given, strict=True):
        if getattr(table, name) != value:
            raise ScheduleError(
                f"pipeline.schedule={schedule}: {function} returned a table with "
                f"{name}={getattr(table, name)}, but was asked for {value}"
            )
    validate(table)
    if table.kinds == ("F",):
        raise ScheduleError(
            f"pipeline.schedule={schedule}: {function} returned a table without backward units; "
            f"add B, or I and W"
        )


def check_named(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    forwarding_delay: int,
    slack: int,
) -> None:
    """Check that a schedule of the catalogue supports these arguments of `load_schedule`.

    Raises:
      ValueError: there is no such schedule.
      ScheduleError: sizes are below 1, or it does not support options; with all reasons.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            misnamed_table(schedule)
            or f"pipeline.schedule={schedule!r} does not exist; choose one of "
            f"{', '.join(SCHEDULES)} ({OWN_VARIANTS}){nearest(schedule, [*SCHEDULES])}"
        )
    facts = SCHEDULES[schedule]
    sizes = {
        "mesh.ici.stage": num_stages,
        "pipeline.num_microbatches": num_microbatches,
        "pipeline.num_repeats": num_repeats,
    }
    reasons = [f"{key}={size}: must be at least 1" for key, size in sizes.items() if size < 1]
    if num_repeats >= 1 and num_repeats != facts.repeats_for(num_repeats):
        chunks = "one chunk" if facts.repeats == 1 else f"{facts.repeats} chunks"
        reasons.append(
            f"pipeline.num_repeats={num_repeats}: schedule {schedule} has {chunks} per stage; "
            f"set it to {facts.repeats}, or use lockstep_1f1b, interleaved_1f1b or circular"
        )
    if forwarding_delay > 1 and not facts.delays:
        reasons.append(
            f"pipeline.delay_activation_forwarding=true: schedule {schedule} has no fixed ticks to "
            f"delay; set it to false, or use lockstep_1f1b or circular"
        )
    if slack > 0 and not facts.overlaps:
        reasons.append(
            f"pipeline.overlap_slots=true: no tick of schedule {schedule} has an F and a B slot to "
            f"overlap; set it to false, or use lockstep_1f1b"
        )
    if reasons:
        raise ScheduleError(*reasons)
