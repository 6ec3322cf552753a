"""Load a schedule's table by name, from a CSV file, or as configured; check sizes and options."""

import os

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.imports import OWN_VARIANTS, implementation
from maxpipe.config.rules.layout import chunk_layers, is_csv, num_stages
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO, nearest
from maxpipe.pipeline.schedules.csv_files import load_csv
from maxpipe.pipeline.schedules.table import ScheduleError, Table
from maxpipe.pipeline.schedules.timed_orders import UnitTimes
from maxpipe.pipeline.schedules.validate import validate


def build_table(config: Config) -> Table:
    """Build the schedule's table for a resolved configuration with a pipeline."""
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
      num_microbatches: M; need not be a multiple of S.
      num_repeats: V, chunks per stage; by default the schedule's or the file's own, 1 where any
        number is legal.
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
        sizes = num_stages, num_microbatches, num_repeats
        return load_csv(schedule, *sizes, forwarding_delay=forwarding_delay, slack=slack)
    if num_repeats is None:
        num_repeats = SCHEDULES[schedule].repeats_for(1) if schedule in SCHEDULES else 1
    given = {
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "num_repeats": num_repeats,
        "forwarding_delay": forwarding_delay,
        "slack": slack,
    }
    _check_supported(schedule, **given)
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
    # The function may be a user's.
    wrong = [f"{name}={value}" for name, value in given.items() if getattr(table, name, 0) != value]
    if not isinstance(table, Table) or wrong or table.kinds == ("F",):
        raise ScheduleError(
            f"pipeline.schedule={schedule}: {facts.implementation} must return a Table, such as "
            f"from_ticks and place make, with backward units{f' and {wrong[0]}' if wrong else ''}"
        )
    validate(table)
    return table


def _check_supported(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    forwarding_delay: int,
    slack: int,
) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(
            f"pipeline.schedule={schedule!r} is neither a file NAME.csv nor one of "
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
