"""Choose how many layers each stage gets under a memory limit, and predict what a choice costs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import inf
from typing import TypeAlias

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import resolve
from maxpipe.config.options import update
from maxpipe.config.rules.rule import Updates
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.terminal import Note
from maxpipe.config.values import AUTO, words_of
from maxpipe.devices.chips import GIB
from maxpipe.pipeline.layout import build_layout, layers_in_chunks
from maxpipe.pipeline.schedules.load import build_table, is_timed, times_of_chunks
from maxpipe.pipeline.schedules.table import KINDS, ScheduleError, Table, from_ticks
from maxpipe.plan.layer_times import LayerTimes, layer_times
from maxpipe.plan.memory_changes import memory_changes
from maxpipe.plan.search.memory import StageMemory
from maxpipe.plan.simulate import Costs, Simulation, simulate
from maxpipe.plan.stage_cut import balance_layers, chunk_sizes, lightened

LAYERS_KEY = "pipeline.layers_per_stage"
TIMES_KEY = "pipeline.unit_times"
LIMIT_KEY = "pipeline.memory_limit_gib"
MOST_REMEDIES = 5  # that an error names
Sizes: TypeAlias = tuple[int, ...]  # layers of the chunks of a stage


@dataclass(frozen=True, eq=False)
class PredictedStages:
    """The predicted cost of stages with given numbers of layers.

    Attributes:
      sizes: layers of each chunk, in model order.
      times: the times of a layer and of the head.
      run: the simulated schedule with these stages; its unit of time is one layer's forward.
      memory: float [S], bytes on one device of each stage, from shapes; for the MPMD engine.
    """

    sizes: list[int]
    times: LayerTimes
    run: Simulation
    memory: np.ndarray

    @property
    def layers(self) -> list[int]:
        stages = self.run.table.stage_of_chunk
        return np.bincount(stages, self.sizes).astype(int).tolist()

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
    """Build the table that is simulated: a lockstep one on the MPMD engine loses its ticks.

    No stage waits for a tick there; only the order of units on each stage remains.

    Raises:
      ScheduleError: the schedule cannot be built.
    """
    table = build_table(config)
    if ENGINES[config.pipeline.engine].one_program or not table.lockstep:
        return table
    ticks = {
        kind: np.where(t < 0, -1, len(KINDS) * t + KINDS.index(kind))
        for kind, t in table.ticks.items()
    }
    used = np.unique(np.concatenate([t[t >= 0] for t in ticks.values()]))
    ticks = {kind: np.where(t < 0, -1, np.searchsorted(used, t)) for kind, t in ticks.items()}
    free = from_ticks(
        table.name, table.num_stages, table.num_repeats, ticks, placement=table.placement
    )
    return replace(free, source=table.source)


def predict(config: Config, sizes: Sequence[int], *, on_tpus: bool = False) -> PredictedStages:
    """Simulate the schedule with chunks of these sizes.

    Args:
      config: the resolved configuration; its own numbers of layers are ignored.
      sizes: layers of each chunk, in model order.
      on_tpus: whether the devices are known to be TPUs.

    Raises:
      ScheduleError: the schedule cannot be built.
    """
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


def fullest_stage_bytes(config: Config, *, on_tpus: bool = False) -> float:
    """Return the bytes on a device of the fullest stage; stages must have been chosen."""
    chunks = build_layout(config).chunk_sizes
    return float(predict(config, chunks, on_tpus=on_tpus).memory.max())


def bubble_fraction(config: Config) -> float:
    """Return the idle share of the stages' time, from 0 to 1, with the times of their layers.

    Args:
      config: the resolved configuration, with its stages chosen.

    Raises:
      ScheduleError: the schedule cannot be built.
    """
    return simulate_stages(config).bubble_fraction


def simulate_stages(config: Config) -> Simulation:
    """Simulate a step with the chosen stages, the head included; arguments as `bubble_fraction`."""
    return predict(config, build_layout(config).chunk_sizes).run


def slowest_stage(config: Config) -> str:
    """Return which stage takes over 10 % more than the mean and what helps; empty if none does.

    Args:
      config: the resolved configuration, with its stages chosen.
    """
    run = simulate_stages(config)
    stage, excess = run.slowest
    if excess <= 0.1:
        return ""
    # Larger chunks lessen what a head, a window or a remainder adds to one of them.
    remedy = "fewer stages or repeats, or more layers, even it out"
    for keys, other in _other_sizes(config):
        if (saved := 1 - other.run.makespan / run.makespan) >= 0.01:
            remedy = f"{keys} saves {100 * saved:.0f} % of a step"
            break
    return f"stage {stage}, {100 * excess:.0f} % above the mean; {remedy}"


def _other_sizes(config: Config) -> Iterator[tuple[str, PredictedStages]]:
    """Yield the keys of sizes that maxpipe would choose, and what they cost."""
    if ENGINES[config.pipeline.engine].auto_stages:
        if config.pipeline.parallel_layers == config.model.stacked_layers:
            for prediction in _candidates(config, memory_limit(config, None)):
                yield f"{LAYERS_KEY}=auto", prediction
    elif uniform := uniform_sizes(config):
        yield f"{LAYERS_KEY}=[]", predict(config, uniform)


def uniform_sizes(config: Config) -> list[int] | None:
    """Return equal sizes for all chunks, or None if the layers do not divide evenly."""
    chunks = run_table(config).num_chunks
    size, remainder = divmod(len(layers_in_chunks(config)), chunks)
    return None if remainder else [size] * chunks


def plan_stages(config: Config, limit: float) -> PredictedStages:
    """Plan stages so that the slowest one takes the least time.

    Uniform stages are taken if the simulator finds them no slower.

    Args:
      config: the resolved configuration, with `pipeline.layers_per_stage` still auto.
      limit: bytes that a device may use; infinite if unknown.

    Raises:
      ConfigError: no choice fits the limit; the message says by how much, and what would help.
      ScheduleError: the schedule cannot be built.
    """
    predictions = _candidates(config, limit)
    fitting = [p for p in predictions if _is_within(p, limit)]
    if not fitting:
        raise _does_not_fit(config, limit, predictions)
    # With several chunks per stage, balanced stages need not be the fastest.
    return min(fitting, key=lambda p: round(p.run.makespan, 9))


def _candidates(config: Config, limit: float) -> list[PredictedStages]:
    """Predict uniform and balanced stages; return none if none fits in the schedule's own order.

    An order that follows the times of units, which depend on the stages, may need more memory.
    """
    table, times = run_table(config), layer_times(config)
    weight = cache(StageMemory(config, table).bytes)
    first_stage, head_stage = int(table.stage_of_chunk[0]), int(table.stage_of_chunk[-1])

    def time(stage: int, first: int, sizes: Sizes) -> float:
        count, ends = sum(sizes), times.head if stage == head_stage else 0.0
        if stage == first_stage:
            ends += times.first_layers
        # A stage's chunks are not adjacent in the model: their layers count as average ones.
        layers = times.of_layers(first, count) if len(sizes) == 1 else times.layer * count
        return layers + ends

    def cost(stage: int, first: int, sizes: Sizes) -> float:
        return time(stage, first, sizes) if weight(stage, sizes) <= limit else inf

    sizes = _distribute(config, table, cost, weight, limit)
    if sizes is None:
        return []
    predictions = [predict(config, sizes)]
    if uniform := uniform_sizes(config):
        predictions.insert(0, predict(config, uniform))
    return predictions


def _is_within(prediction: PredictedStages, limit: float) -> bool:
    return bool((prediction.memory <= limit).all())


def choose_stages(config: Config, chip_bytes: float | None, note: Note) -> Config:
    """Return the configuration with `layers_per_stage` and `unit_times` decided if they are auto.

    Args:
      chip_bytes: memory of a device; None if unknown.
      note: function called with the decision and its reason, one line each.

    Raises:
      ConfigError: nothing fits, or the schedule cannot be built.
    """
    config = with_unit_times(config)
    if config.pipeline.layers_per_stage == AUTO:
        config = _with_stages(config, chip_bytes, note)
    if _follows_times(config) and config.pipeline.unit_times:
        note(_order_reason(config))
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


def _order_reason(config: Config) -> str:
    """Return a line that compares the order that follows `unit_times` with the published one."""
    published = run_table(update(config, {TIMES_KEY: []}))
    times = times_of_chunks(config)
    assert times is not None, "chosen before"
    costs = Costs(*times)
    before, now = (simulate(table, costs) for table in (published, run_table(config)))
    numbers = str(config.pipeline.unit_times).replace(" ", "")
    return (
        f"{TIMES_KEY}={numbers}: a step of {config.pipeline.schedule} takes {now.makespan:.4g}, "
        f"{before.makespan:.4g} in the published order; "
        f"bubble {now.bubble_fraction:.1%}, {before.bubble_fraction:.1%}"
    )


def _with_stages(config: Config, chip_bytes: float | None, note: Note) -> Config:
    limit = memory_limit(config, chip_bytes)
    try:
        chosen, uniform = plan_stages(config, limit), uniform_sizes(config)
    except ScheduleError as error:
        # Every reason begins with its key.
        raise ConfigError(*(Problem("", reason) for reason in error.reasons)) from error
    for line in _reasons(chosen, predict(config, uniform) if uniform else None, limit):
        note(line)
    return update(
        config, {LAYERS_KEY: chosen.sizes, "pipeline.num_layers_per_stage": max(chosen.sizes)}
    )


def memory_limit(config: Config, chip_bytes: float | None) -> float:
    """Return the bytes that a device may use: the key's, else the chip's, else infinity."""
    return GIB * config.pipeline.memory_limit_gib or chip_bytes or inf


def of_stage(table: Table, sizes: Sequence[int], stage: int) -> list[int]:
    return [size for size, s in zip(sizes, table.stage_of_chunk, strict=True) if s == stage]


def _distribute(
    config: Config,
    table: Table,
    cost: Callable[[int, int, Sizes], float],
    weight: Callable[[int, Sizes], float],
    limit: float,
) -> list[int] | None:
    """Distribute all layers by `balance_layers`; return the chunk sizes, or None if nothing fits.

    The chunks of a stage are as equal as memory allows.

    Args:
      cost: returns the cost of a stage, infinite if its chunks do not fit; its arguments are the
        stage, the first layer if it has one chunk, and the chunk sizes.
      weight: returns the bytes of a stage with these chunk sizes.
    """
    total, times = config.pipeline.parallel_layers, layer_times(config)
    first_stage, head_stage = table.stage_of_chunk[0], table.stage_of_chunk[-1]

    # Fewest layers of each stage that no split over its chunks made fit.
    too_many: list[float] = [inf] * table.num_stages

    @cache
    def chunks(stage: int, layers: int) -> Sizes:
        head = times.head / times.layer if stage == head_stage else 0.0
        first = times.first_layers / times.layer if stage == first_stage else 0.0
        sizes = tuple(chunk_sizes(layers, table.num_repeats, head, first))
        if layers >= too_many[stage]:
            return sizes
        sizes = lightened(sizes, partial(weight, stage), limit)
        if weight(stage, sizes) > limit:
            too_many[stage] = layers
        return sizes

    def cost_of(stage: int, first: int, count: int) -> float:
        return cost(stage, first, chunks(stage, count)) if count >= table.num_repeats else inf

    layers = balance_layers(cost_of, table.num_stages, total)
    if layers is None:
        return None
    sizes = [0] * table.num_chunks
    for stage, count in enumerate(layers):
        fitting = lightened(chunks(stage, count), partial(weight, stage), limit)
        for chunk, size in enumerate(fitting):
            sizes[int(table.global_chunk(chunk, stage))] = size
    return sizes


def _reasons(
    chosen: PredictedStages, uniform: PredictedStages | None, limit: float
) -> Iterator[str]:
    """Yield two lines: what was chosen and why."""
    run, times = chosen.run, chosen.times
    against = ""
    if uniform and uniform.sizes == chosen.sizes:
        against = "; no others are faster"
    elif uniform:
        longer = uniform.run.makespan / chosen.run.makespan - 1
        against = f"; of uniform ones {uniform.slowest:.4g}, a step {longer:+.1%}"
        if (uniform.memory > limit).any():
            against += " that does not fit"
    sizes = str(chosen.sizes).replace(" ", "")
    yield (
        f"{LAYERS_KEY}={sizes}: the slowest stage takes {chosen.slowest:.4g} forwards of a layer "
        f"a microbatch{against}"
    )
    forward, backward = (
        " ".join(f"{time:.4g}" for time in of_stages) for of_stages in chosen.times_of_stages
    )
    memory = " ".join(f"{count / GIB:.3g}" for count in chosen.memory)
    if limit != inf:
        memory += f" of {limit / GIB:.3g}"
    yield (
        f"predicted by stage: F {forward}, B {backward}, head {times.head:.3g}; "
        f"bubble {run.bubble_fraction:.1%}; {memory} GiB a device"
    )


def _does_not_fit(
    config: Config, limit: float, predictions: Sequence[PredictedStages]
) -> ConfigError:
    """Return the error for a limit that is too low, also for these predictions."""
    if predictions:
        least = min(predictions, key=lambda p: float(p.memory.max()))
        sizes, needed = least.sizes, least.memory.tolist()
    else:
        table = run_table(config)
        weight = cache(StageMemory(config, table).bytes)
        balanced = _distribute(
            config, table, lambda s, first, sizes: weight(s, sizes), weight, limit
        )
        assert balanced is not None, "too few layers for the chunks"
        sizes = balanced
        needed = [weight(s, tuple(of_stage(table, sizes, s))) for s in range(table.num_stages)]
    worst = int(np.argmax(needed))
    source = LIMIT_KEY if config.pipeline.memory_limit_gib else "the chip's memory"
    excess = (needed[worst] - limit) / GIB
    tried = " that was tried" if config.pipeline.num_repeats > 1 else ""
    message = (
        f"no choice of stages{tried} fits {limit / GIB:.3g} GiB a device ({source}): "
        f"with {str(sizes).replace(' ', '')} stage {worst} needs {needed[worst] / GIB:.3g} GiB "
        f"by estimate, {excess:.3g} GiB too much"
    )
    fitting = (ch for ch in memory_changes(config) if _would_fit(config, ch, limit))
    remedies = [words_of(changes) for changes in islice(fitting, MOST_REMEDIES)]
    remedies.append("more devices in mesh.ici.fsdp, mesh.ici.tensor or mesh.ici.stage")
    return ConfigError(Problem(LAYERS_KEY, f"{message}; what would help: {'; '.join(remedies)}"))


def _would_fit(config: Config, changes: Updates, limit: float) -> bool:
    """Return whether changes are legal and let some choice of stages fit."""
    devices = math.prod(map(config.mesh.size, MESH_AXES))
    try:
        changed = resolve(update(config, changes), devices, config.compile.num_slices)
        if not ENGINES[changed.pipeline.engine].auto_stages:
            return False
        return any(_is_within(p, limit) for p in _candidates(changed, limit))
    except (ConfigError, ScheduleError):  # a CSV file has a fixed number of microbatches
        return False
