"""Predict a step of a compiled program, and the times of its units."""

from collections.abc import Sequence
from functools import partial

from jax.sharding import Mesh

from maxpipe.compiling.hlo import parse
from maxpipe.compiling.prediction.activity import Phase, phases_of, times_taken
from maxpipe.compiling.prediction.constants import compiler_version, constants_of
from maxpipe.compiling.prediction.operations import Part, Prices
from maxpipe.compiling.prediction.origins import Origins
from maxpipe.compiling.prediction.prediction import (
    CollectiveTime,
    PhaseTime,
    Prediction,
)
from maxpipe.compiling.prediction.timeline import OUTSIDE, Timeline
from maxpipe.compiling.prediction.units import unit_seconds
from maxpipe.compiling.prediction.walk import walk
from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.devices.chips import Chip, devices_per_chip
from maxpipe.pipeline.engines.scheduled.plan import lockstep_plan
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.planning.simulate import simulate

ESTIMATE = "estimated_cycles"


def is_predictable(mesh: Mesh) -> bool:
    """Return whether the devices are TPUs, whose compiler writes estimates."""
    return mesh.devices.flat[0].platform == "tpu"


def predict(
    config: Config, mesh: Mesh, chip: Chip, hlo: str, model_flops: float
) -> tuple[Prediction, Timeline | None]:
    """Predict the step of a compiled program.

    Args:
      config: resolved.
      mesh: what the program was compiled for.
      chip: of the mesh.
      hlo: optimized and scheduled text of one device's program.
      model_flops: of a step over all devices.

    Returns:
      The prediction, and the timeline that it sums up; None if there is none.
    """
    per_chip = devices_per_chip(mesh.devices.reshape(-1).tolist())
    constants = constants_of(chip, per_chip)
    version = compiler_version()
    if constants is None:
        reason = f"the clock of {chip.name} is not known"
        return Prediction(None, version, None, {}, unknown=[reason]), None
    if f'"{ESTIMATE}"' not in hlo:
        reason = f"libtpu {version} writes no {ESTIMATE} into the program"
        return Prediction(None, version, constants, {}, unknown=[reason]), None
    module = parse(hlo)
    engine = ENGINES[config.pipeline.engine]
    table = build_table(config) if engine.has_stages else None
    phases = phases_of(lockstep_plan(table)) if table and engine.lockstep else []
    timeline = walk(
        module,
        Prices(module, mesh, chip, constants),
        Origins(hlo, module),
        partial(times_taken, phases),
    )
    unknown = unknowns(timeline)
    units = unit_seconds(timeline, table, phases) if table else None
    num_chips = mesh.size // per_chip
    seconds = None if unknown else timeline.seconds
    tokens = config.data.global_batch_size * config.data.sequence_length
    peak = num_chips * chip.peak_flops[config.model.dtype]
    prediction = Prediction(
        seconds=seconds,
        libtpu=version,
        constants=constants,
        parts=parts_of(timeline),
        collectives=collectives_of(timeline),
        bubble=simulate(table, units.costs()).bubble if table and units else None,
        conditionals=timeline.conditionals,
        phases=_phase_times(timeline, phases),
        units=units,
        tokens_per_second=tokens / seconds / num_chips if seconds else None,
        mfu=model_flops / peak / seconds if seconds else None,
        unknown=unknown,
    )
    return prediction, timeline


def parts_of(timeline: Timeline) -> dict[Part, float]:
    """Return the seconds of a step by part."""
    parts = dict.fromkeys(Part, 0.0)
    for spent in timeline.spent:
        parts[spent.price.part] += spent.total
    return parts


def collectives_of(timeline: Timeline) -> list[CollectiveTime]:
    """Return the exposed seconds of collectives by kind and axes, the slowest first."""
    totals: dict[tuple[str, str], float] = {}
    for spent in timeline.spent:
        if spent.price.part is Part.COLLECTIVES:
            key = spent.price.collective, spent.price.axes
            totals[key] = totals.get(key, 0.0) + spent.total
    times = [CollectiveTime(*key, seconds) for key, seconds in totals.items() if seconds]
    return sorted(times, key=lambda time: -time.seconds)


def unknowns(timeline: Timeline) -> list[str]:
    """Return in words what cannot be priced and would matter."""
    names: dict[str, list[str]] = {}
    for spent in timeline.spent:
        if spent.price.seconds is None:
            reason = {
                Part.MATRIX_PRODUCTS: f"matrix products without {ESTIMATE}",
                Part.COLLECTIVES: "transfers over a network of unknown bandwidth",
            }.get(spent.price.part, "kernels whose work is unknown")
            names.setdefault(reason, []).append(spent.name)
    if timeline.unknown_loops:
        names["loops of unknown length"] = timeline.unknown_loops
    return [
        f"{reason}: {', '.join(sorted(set(list_))[:3])}{', ...' if len(set(list_)) > 3 else ''}"
        for reason, list_ in names.items()
    ]


def _phase_times(timeline: Timeline, phases: Sequence[Phase]) -> list[PhaseTime]:
    """Return the seconds of each phase, in the order in which they run."""
    seconds: dict[str, float] = {}
    for spent in timeline.spent:
        seconds[spent.place.phase] = seconds.get(spent.place.phase, 0.0) + spent.total
    names = {f"phase_{number}": phase for number, phase in enumerate(phases)}
    iterations: dict[str, float] = {}
    for loop in timeline.loops:
        iterations[loop.phase] = iterations.get(loop.phase, 0.0) + loop.iterations
    times = []
    for name in sorted(
        seconds, key=lambda name: (name == OUTSIDE, name.startswith("backward"), name)
    ):
        phase = names.get(name)
        count = phase.ticks if phase else iterations.get(name, 0.0)
        times.append(PhaseTime(name, phase.kinds if phase else "", count, seconds[name]))
    return times
