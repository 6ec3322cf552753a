"""Choose how many layers each stage gets under a memory limit, and predict what a choice costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import permutations
from math import inf
from typing import TypeAlias

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note
from maxpipe.config.values import AUTO
from maxpipe.devices.chips import GIB
from maxpipe.pipeline.layout import build_layout, layers_in_chunks
from maxpipe.pipeline.schedules.load import build_table, is_timed
from maxpipe.pipeline.schedules.table import KINDS, ScheduleError, Table, from_ticks
from maxpipe.plan.layer_times import LayerTimes, layer_times
from maxpipe.plan.search.memory import StageMemory
from maxpipe.plan.simulate import Simulation, simulate

LAYERS_KEY = "pipeline.layers_per_stage"
TIMES_KEY = "pipeline.unit_times"
LIMIT_KEY = "pipeline.memory_limit_gib"
REMEDIES = (
    "pipeline.remat_policy=full, pipeline.remat_layers=true, more microbatches, "
    "pipeline.schedule=1f1b, or more devices in mesh.ici.fsdp, tensor or stage"
)
Sizes: TypeAlias = tuple[int, ...]  # layers of the chunks of a stage


@dataclass(frozen=True, eq=False)
class PredictedStages:
    """The predicted cost of stages with given numbers of layers."""

    sizes: list[int]  # layers of each chunk, in model order
    times: LayerTimes
    run: Simulation  # its unit of time is one layer's forward
    memory: np.ndarray  # float [S], bytes on a device of each stage, from shapes; for MPMD

    @property
    def times_of_stages(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of a microbatch on each stage, without the head: forward, backward."""
        stages, costs = self.run.table.stage_of_chunk, self.times.costs(self.sizes, self.run.table)
        return np.bincount(stages, costs.forward), np.bincount(stages, costs.backward)

    @property
    def slowest(self) -> float:
        """Return the slowest stage's time for a microbatch: all chunks, forward and backward."""
        return float(self.run.work.max()) / self.run.table.num_microbatches


def run_table(config: Config) -> Table:
    """Build the table that is simulated, or raise ScheduleError.

    A lockstep one loses its ticks on the MPMD engine: no stage waits for a tick there; only the
    order of units on each stage remains. On a lockstep engine, stages wait for each other in the
    ticks of any table.
    """
    table, engine = build_table(config), ENGINES[config.pipeline.engine]
    if engine.one_program or not table.lockstep:
        return replace(table, lockstep=True) if engine.lockstep else table
    ticks = {
        kind: np.where(t < 0, -1, len(KINDS) * t + KINDS.index(kind))
        for kind, t in table.ticks.items()
    }
    used = np.unique(np.concatenate([t[t >= 0] for t in ticks.values()]))
    ticks = {kind: np.where(t < 0, -1, np.searchsorted(used, t)) for kind, t in ticks.items()}
    sizes = table.num_stages, table.num_repeats
    free = from_ticks(table.name, *sizes, ticks, placement=table.placement)
    return replace(free, source=table.source)


def predict(
    config: Config, sizes: Sequence[int] | None = None, *, on_tpus: bool = False
) -> PredictedStages:
    """Simulate the schedule of a resolved configuration with chunks of these sizes, or its own."""
    sizes = sizes or build_layout(config).chunk_sizes
    # An order that follows unit times depends on the sizes; no layer is left outside the pipeline.
    sized = update(config, {LAYERS_KEY: [*sizes], "pipeline.parallel_layers": sum(sizes)})
    table, times = run_table(sized), layer_times(config)
    memory = StageMemory(config, table, on_tpus=on_tpus)
    return PredictedStages(
        list(sizes),
        times,
        simulate(table, times.costs(sizes, table)),
        np.array([memory.bytes(s, of_stage(table, sizes, s)) for s in range(table.num_stages)]),
    )


def bubble_fraction(config: Config) -> float:
    """Return the idle share of the stages' time, from 0 to 1, once stages have been chosen."""
    return predict(config).run.bubble_fraction


def slowest_stage(config: Config) -> str:
    """Return which stage takes over 10 % more than the mean and what helps; "" if none does."""
    run = predict(config).run
    stage, excess = run.slowest
    if excess <= 0.1:
        return ""
    has_head = stage == run.table.stage_of_chunk[-1] and not run.table.lockstep
    head = " with the head" if has_head else ""
    # Larger chunks lessen what a head, a window or a remainder adds to one of them.
    auto = f"{LAYERS_KEY}=auto, " if ENGINES[config.pipeline.engine].auto_stages else ""
    remedy = f"{auto}fewer stages or repeats, or more layers, may even it out"
    return f"stage {stage}{head}, {100 * excess:.0f} % above the mean; {remedy}"


def uniform_sizes(config: Config) -> list[int] | None:
    """Return equal sizes for all chunks, or None if the layers do not divide evenly."""
    chunks = run_table(config).num_chunks
    size, remainder = divmod(len(layers_in_chunks(config)), chunks)
    return None if remainder else [size] * chunks


def plan_stages(config: Config, limit: float) -> PredictedStages:
    """Plan stages that fit a limit in bytes, so that the slowest one takes the least time.

    Uniform stages are taken if the simulator finds them no slower.

    Raises:
      ConfigError: no choice fits the limit; the message says by how much, and what would help.
      ScheduleError: the schedule cannot be built.
    """
    # None if none fits in the schedule's own order. One that follows the times of units, which
    # depend on the stages, may need more memory.
    balanced = _distribute(config, limit)
    sizes = (uniform_sizes(config), balanced) if balanced else ()
    predictions = [predict(config, each) for each in sizes if each]
    fitting = [p for p in predictions if p.memory.max() <= limit]
    if not fitting:
        raise _does_not_fit(config, limit, predictions)
    # With several chunks per stage, balanced stages need not be the fastest.
    return min(fitting, key=lambda p: round(p.run.makespan, 9))


def _distribute(config: Config, limit: float, *, by_memory: bool = False) -> list[int] | None:
    """Distribute all layers over chunks so that the slowest, or fullest, stage has the least.

    Return the chunk sizes, as equal within a stage as memory allows, or None if nothing fits.
    """
    table, times = run_table(config), layer_times(config)
    weight = cache(StageMemory(config, table).bytes)
    ends = np.zeros((table.num_stages, 2))  # time that a stage takes besides its layers
    ends[table.stage_of_chunk[0], 0] = sum(times.first)
    ends[table.stage_of_chunk[-1], 1] = times.head

    @cache
    def chunks(stage: int, count: int) -> Sizes:
        sizes = tuple(chunk_sizes(count, table.num_repeats, *(ends[stage] / times.layer)))
        more = not by_memory and count > table.num_repeats
        if more and weight(stage, chunks(stage, count - 1)) > limit:
            return sizes  # with another layer it does not fit either
        return lightened(sizes, partial(weight, stage), limit)

    def cost(stage: int, first: int, count: int) -> float:
        if count < table.num_repeats:
            return inf
        held = weight(stage, chunks(stage, count))
        if by_memory or held > limit:
            return held if by_memory else inf
        # A stage's chunks are not adjacent in the model: their layers count as average ones.
        is_one = table.num_repeats == 1
        layers = times.of_layers(first, count) if is_one else times.layer * count
        return layers + float(ends[stage].sum())

    layers = balance_layers(cost, table.num_stages, config.pipeline.parallel_layers)
    if layers is None:
        return None
    sizes = [0] * table.num_chunks
    for stage, count in enumerate(layers):
        for chunk, size in enumerate(chunks(stage, count)):
            sizes[int(table.global_chunk(chunk, stage))] = size
    return sizes


def balance_layers(
    cost: Callable[[int, int, int], float], num_stages: int, total: int
) -> list[int] | None:
    """Return numbers of layers such that the most costly stage costs the least.

    Among equal choices the one whose stages differ least is taken, and among these the one with
    more layers in front, whose pipeline is full a little earlier. Return None if every choice has
    a stage that cannot hold its layers.

    Args:
      cost: returns what holding some layers costs a stage, infinite where it cannot; its arguments
        are the stage, the first layer, and the number of layers.
      num_stages: number of stages, which hold the layers one after another.
      total: layers to distribute.
    """

    @cache
    def cost_of(stage: int, left: int, layers: int) -> float:
        return cost(stage, total - left, layers)

    @cache
    def worst(stage: int, left: int) -> float:
        if stage == num_stages - 1:
            return cost_of(stage, left, left)
        return min(
            max(cost_of(stage, left, n), worst(stage + 1, left - n)) for n in range(left + 1)
        )

    limit = worst(0, total) * (1 + 1e-9)
    if limit == inf:
        return None

    @cache
    def spread(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return (sum of squared costs from `stage` on, layers of each stage with a minus sign).

        The sum is infinite if a cost is above the limit. With the sign, the least of equal sums has
        more layers in front.
        """
        if stage == num_stages - 1:
            return square(cost_of(stage, left, left)), (-left,)
        choices = []
        for n in range(left + 1):
            own = square(cost_of(stage, left, n))
            others, layers = spread(stage + 1, left - n) if own < inf else (inf, ())
            choices.append((own + others, (-n, *layers)))
        return min(choices)

    def square(cost: float) -> float:
        if cost > limit:
            return inf
        # An integer, so that sums do not depend on the order of their terms.
        return round(1e9 * (cost / limit) ** 2) if limit else 0

    return [-n for n in spread(0, total)[1]]


def chunk_sizes(layers: int, num_chunks: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Distribute a stage's layers over its chunks, at least one each and otherwise evenly.

    The first chunks get more where the layers do not divide. `first` and `last` are the work of the
    first and the last chunk besides their layers, in layers.
    """
    assert layers >= num_chunks
    work = [1.0] * num_chunks
    work[0] += first
    work[-1] += last
    sizes = [1] * num_chunks
    for _ in range(layers - num_chunks):
        least = work.index(min(work))
        sizes[least] += 1
        work[least] += 1
    return sizes


def lightened(
    sizes: tuple[int, ...], weight: Callable[[tuple[int, ...]], float], limit: float
) -> tuple[int, ...]:
    """Move layers between a stage's chunks, one by one, until it weighs at most the limit.

    If it cannot, return sizes that no such move makes lighter; of two chunks, the lightest ones.
    What the stage weighs is convex in the sizes, each of which stays at least one.
    """
    while weight(sizes) > limit:
        moves = (
            tuple(n - (c == source) + (c == target) for c, n in enumerate(sizes))
            for source, target in permutations(range(len(sizes)), 2)
            if sizes[source] > 1
        )
        lightest = min(moves, key=weight, default=sizes)
        if weight(lightest) >= weight(sizes):
            break
        sizes = lightest
    return sizes


def choose_stages(config: Config, chip_bytes: float | None, note: Note) -> Config:
    """Return the configuration with `layers_per_stage` and `unit_times` decided if they are auto.

    Call `note` with each decision and its reason. Raise ConfigError if nothing fits the memory of
    a chip (None if unknown), or if the schedule cannot be built.
    """
    config = with_unit_times(config)
    if config.pipeline.layers_per_stage == AUTO:
        limit = memory_limit(config, chip_bytes)
        try:
            chosen, uniform = plan_stages(config, limit), uniform_sizes(config)
        except ScheduleError as error:
            # Every reason begins with its key.
            raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from error
        for line in _reasons(chosen, predict(config, uniform) if uniform else None, limit):
            note(line)
        largest = max(chosen.sizes)
        config = update(
            config, {LAYERS_KEY: chosen.sizes, "pipeline.num_layers_per_stage": largest}
        )
    if _follows_times(config) and config.pipeline.unit_times:
        numbers = str(config.pipeline.unit_times).replace(" ", "")
        note(f"{TIMES_KEY}={numbers}: the order of {config.pipeline.schedule} follows these times")
    return config


def with_unit_times(config: Config) -> Config:
    """Return the configuration, with `pipeline.unit_times` by FLOPs if it is auto and matters."""
    if config.pipeline.unit_times != AUTO or not _follows_times(config):
        return config
    times = layer_times(config)
    numbers = [1.0, times.input_gradient, times.weight_gradient, 0.0, times.head]
    return update(config, {TIMES_KEY: [float(f"{number:.4g}") for number in numbers]})


def _follows_times(config: Config) -> bool:
    pipeline = config.pipeline
    return is_timed(pipeline.schedule) and ENGINES[pipeline.engine].takes(TIMES_KEY)


def memory_limit(config: Config, chip_bytes: float | None) -> float:
    """Return the bytes that a device may use: the key's, else the chip's, else infinity."""
    return GIB * config.pipeline.memory_limit_gib or chip_bytes or inf


def of_stage(table: Table, sizes: Sequence[int], stage: int) -> Sizes:
    return tuple(n for n, s in zip(sizes, table.stage_of_chunk, strict=True) if s == stage)


def _reasons(
    chosen: PredictedStages, uniform: PredictedStages | None, limit: float
) -> Iterator[str]:
    sizes = str(chosen.sizes).replace(" ", "")
    line = f"{LAYERS_KEY}={sizes}: the slowest stage takes {chosen.slowest:.4g} forwards of a layer"
    if uniform and uniform.sizes != chosen.sizes:
        longer = uniform.run.makespan / chosen.run.makespan - 1
        line += f"; a step of uniform ones {longer:+.1%}"
        line += " that does not fit" * bool(uniform.memory.max() > limit)
    yield line
    forward, backward = (" ".join(f"{t:.4g}" for t in times) for times in chosen.times_of_stages)
    memory = " ".join(f"{count / GIB:.3g}" for count in chosen.memory)
    memory += f" of {limit / GIB:.3g}" * (limit != inf)
    yield (
        f"predicted by stage: F {forward}, B {backward}, head {chosen.times.head:.3g}; "
        f"bubble {chosen.run.bubble_fraction:.1%}; {memory} GiB a device"
    )


def _does_not_fit(
    config: Config, limit: float, predictions: Sequence[PredictedStages]
) -> ConfigError:
    if not predictions:
        predictions = [predict(config, _distribute(config, limit, by_memory=True))]
    least = min(predictions, key=lambda p: float(p.memory.max()))
    worst, needed = int(least.memory.argmax()), float(least.memory.max())
    source = LIMIT_KEY if config.pipeline.memory_limit_gib else "the chip's memory"
    message = (
        f"no choice of stages fits {limit / GIB:.3g} GiB a device ({source}): "
        f"with {str(least.sizes).replace(' ', '')} stage {worst} needs {needed / GIB:.3g} GiB "
        f"by estimate, {(needed - limit) / GIB:.3g} GiB too much"
    )
    return ConfigError(Problem(LAYERS_KEY, f"{message}; what may help: {REMEDIES}"))
