"""Predict a step of a compiled program, and the times of its units."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from jax.sharding import Mesh

from maxpipe.compile.hlo import parse
from maxpipe.compile.prediction.constants import compiler_version, constants_of
from maxpipe.compile.prediction.operations import Part, Prices
from maxpipe.compile.prediction.origins import Origins
from maxpipe.compile.prediction.prediction import (
    Basis,
    CollectiveTime,
    PhaseTime,
    Prediction,
    Speed,
)
from maxpipe.compile.prediction.unit_times import (
    Phase,
    global_share,
    phases_of,
    times_taken,
    unit_seconds,
)
from maxpipe.compile.prediction.walk import OUTSIDE, Timeline, TimesTaken, every_time, walk
from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.devices.chips import Chip, devices_per_chip, slice_of
from maxpipe.pipeline.engines.scheduled.tick_plan import lockstep_plan
from maxpipe.plan.auto_stages import run_table
from maxpipe.plan.simulate import simulate

ESTIMATE = "estimated_cycles"


def is_predictable(mesh: Mesh) -> bool:
    """Return whether the devices are TPUs, whose compiler writes estimates."""
    return mesh.devices.flat[0].platform == "tpu"


def predict(
    config: Config, mesh: Mesh, chip: Chip, hlo: str, model_flops: float
) -> tuple[Prediction, Timeline]:
    """Predict the step of a compiled program; return the prediction and the timeline it sums up."""
    engine = ENGINES[config.pipeline.engine]
    table = run_table(config) if engine.has_stages else None
    phases = phases_of(lockstep_plan(table)) if table and engine.lockstep else []
    basis = basis_of(mesh, chip)
    taken = partial(times_taken, phases, global_share(config))
    timeline = time_program(hlo, mesh, chip, basis, taken)
    prediction = prediction_of(timeline, basis)
    if timeline.unpriced:
        return prediction, timeline
    units = unit_seconds(timeline, table, phases) if table else None
    prediction = replace(
        prediction,
        bubble=simulate(table, units.costs()).bubble if table and units else None,
        conditionals=timeline.conditionals,
        phases=phase_times(timeline, phases),
        units=units,
        speed=speed_of(config, mesh, chip, prediction.seconds, model_flops),
    )
    return prediction, timeline


def prediction_of(timeline: Timeline, basis: Basis) -> Prediction:
    unknown = unknowns(timeline)
    return Prediction(
        seconds=None if unknown else timeline.seconds,
        basis=basis,
        parts={} if timeline.unpriced else parts_of(timeline),
        collectives=collectives_of(timeline),
        unknown=unknown,
        guessed=guessed_seconds(timeline),
    )


def basis_of(mesh: Mesh, chip: Chip) -> Basis:
    devices = mesh.devices.reshape(-1).tolist()
    constants = constants_of(chip, devices_per_chip(devices))
    return Basis(compiler_version(), constants, len(set(map(slice_of, devices))) > 1)


def time_program(
    hlo: str, mesh: Mesh, chip: Chip, basis: Basis, taken: TimesTaken = every_time
) -> Timeline:
    """Walk through a program, one device's optimized and scheduled HLO; return its timeline."""
    if basis.constants is None:
        return Timeline(unpriced=f"the clock of {chip.name} is not known")
    module = parse(hlo)
    # A program that only sums over devices, such as a reduction, has no fusions to estimate.
    instructions = (i for c in module.computations.values() for i in c.instructions.values())
    if any(i.opcode == "fusion" for i in instructions) and f'"{ESTIMATE}"' not in hlo:
        return Timeline(unpriced=f"libtpu {basis.libtpu} writes no {ESTIMATE} into the program")
    prices = Prices(module, mesh, chip, basis.constants)
    return walk(module, prices, Origins(hlo, module), taken)


def speed_of(
    config: Config, mesh: Mesh, chip: Chip, seconds: float | None, model_flops: float
) -> Speed | None:
    """Return the speed of a step that takes `seconds`; None if these are unknown."""
    if not seconds:
        return None
    num_chips = mesh.size // devices_per_chip(mesh.devices.reshape(-1).tolist())
    tokens = config.data.global_batch_size * config.data.sequence_length
    peak = num_chips * chip.peak_flops[config.model.dtype]
    return Speed(tokens / seconds / num_chips, model_flops / peak / seconds)


def parts_of(timeline: Timeline) -> dict[Part, float]:
    parts = dict.fromkeys(Part, 0.0)
    for spent in timeline.spent:
        parts[spent.price.part] += spent.total
    return parts


def guessed_seconds(timeline: Timeline) -> float:
    """Return the seconds of a step that are priced by bytes for lack of an estimate."""
    return sum((spent.total for spent in timeline.spent if spent.price.is_guess), 0.0)


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
    if timeline.unpriced:
        return [timeline.unpriced]
    names: dict[str, list[str]] = {}
    for spent in timeline.spent:
        if spent.price.seconds is None:
            reason = {
                Part.MATRIX_PRODUCTS: f"matrix products without {ESTIMATE}",
                Part.COLLECTIVES: "transfers over a network of unknown bandwidth",
                Part.COPIES: "transfers of which only the end is found",
            }.get(spent.price.part, "kernels whose work is unknown")
            names.setdefault(reason, []).append(spent.name)
    if timeline.unknown_loops:
        names["loops of unknown length"] = timeline.unknown_loops
    return [
        f"{reason}: {', '.join(sorted(set(list_))[:3])}{', ...' if len(set(list_)) > 3 else ''}"
        for reason, list_ in names.items()
    ]


def phase_times(timeline: Timeline, phases: Sequence[Phase]) -> list[PhaseTime]:
    """Return the seconds of each phase, in the order in which they run."""
    seconds: dict[str, float] = {}
    for spent in timeline.spent:
        seconds[spent.place.phase] = seconds.get(spent.place.phase, 0.0) + spent.total
    named = {f"phase_{number}": phase for number, phase in enumerate(phases)}
    iterations = {loop.phase: loop.iterations for loop in timeline.loops}
    # A scope of a user's own model may look like the name of a phase.
    others = [name for name in seconds if name not in (*named, *iterations, OUTSIDE)]
    order = [*named, *iterations, *others, OUTSIDE]
    of_loops = {(loop.phase, loop.iterations): loop.seconds for loop in timeline.loops}
    times = []
    for name in sorted(seconds, key=order.index):
        phase = named.get(name)
        count = phase.ticks if phase else iterations.get(name, 0.0)
        # A tick that XLA has taken out of its loop counts with the others.
        each = of_loops.get((name, count), seconds[name] / count if count else 0.0)
        times.append(PhaseTime(name, phase.kinds if phase else "", count, seconds[name], each))
    return times
