"""Times of units from FLOPs in closed form: what a stage with some number of layers takes.

Counted are products with weights and the two products of attention, of which a causal query does
half; the backward of a product is one for its input and one for its weight, and attention's belongs
to the input gradient.

Left out are norms, softmax, rotations and activation functions, a per cent or two of the FLOPs at
real widths, and the embedding: a lookup forward, and backward a sum that moves bytes and multiplies
nothing. A chunk that is computed again as a whole does without its very last product, which is
counted here; the kernel that runs without accelerators computes attention's masked half too.

Dealing layers out to stages by dynamic programming. Layers are alike, so their number on a stage
says everything.

Choosing how many layers each stage gets under a memory limit, and predicting what a choice
costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import update
from maxpipe.config.rules.batches import data_shards
from maxpipe.config.rules.rule import Updates
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO
from maxpipe.pipeline.remat import remat_policy
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import KINDS, ScheduleError, Table, from_ticks
from maxpipe.planning.flops import layer_products
from maxpipe.planning.simulate import Costs, Simulation, simulate
from maxpipe.planning.stage_memory import StageMemory


@dataclass(frozen=True)
class Work:
    """Times for one microbatch, in units of the forward of one layer.

    Attributes:
      input_gradient: of a layer, with what it computes again.
      weight_gradient: of a layer.
      head: loss and its gradient.
    """

    input_gradient: float
    weight_gradient: float
    head: float

    @property
    def layer(self) -> float:
        """Forward and backward of one layer."""
        return 1.0 + self.input_gradient + self.weight_gradient

    def costs(self, sizes: Sequence[int], table: Table) -> Costs:
        """Costs of a table whose global chunks have so many layers."""
        layers = np.asarray(sizes, float)
        assert layers.shape == (table.num_chunks,)
        return Costs(
            forward=layers.tolist(),
            backward=((self.input_gradient + self.weight_gradient) * layers).tolist(),
            input_gradient=(self.input_gradient * layers).tolist(),
            weight_gradient=(self.weight_gradient * layers).tolist(),
            head=self.head,
        )


def work(config: Config) -> Work:
    """What a resolved configuration's layers and head take."""
    model = config.model
    products: dict[str, float] = dict(layer_products(model))
    weights = sum(products.values())
    # Scores and values of a query, which sees half of the sequence on average.
    products["context"] = attention = (
        model.num_query_heads * model.head_dim * config.data.sequence_length
    )
    forward = weights + attention
    return Work(
        input_gradient=(weights + 2 * attention + _computed_again(config, products)) / forward,
        weight_gradient=weights / forward,
        head=3 * model.vocab_size * model.embed_dim / forward,
    )


def _computed_again(config: Config, products: Mapping[str, float]) -> float:
    """What the backward of a layer computes a second or third time, see `remat._apply.Remat`."""
    pipeline = config.pipeline
    kept = remat_policy(pipeline)
    if kept.everything:
        return 0.0
    passes = pipeline.remat_iterations + pipeline.remat_layers
    return passes * sum(
        time for name, time in products.items() if name not in (*kept.device, *kept.host)
    )


def least_worst(costs: Sequence[Sequence[float]], total: int) -> list[int] | None:
    """Layers of each stage such that the most costly stage costs least, and the others differ little.

    Of choices that are equal in that, the one with more layers in front: its pipeline is full a
    little earlier.

    Args:
      costs: for each stage, the cost of holding 0, 1, ..., `total` layers; infinite where it
        cannot.
      total: layers to deal out.

    Returns:
      Numbers that add up to `total`, or None if every choice has a stage that cannot hold its
      layers.
    """
    num_stages = len(costs)

    @cache
    def worst(stage: int, left: int) -> float:
        """Cost of the most costly stage from `stage` on, which hold `left` layers."""
        if stage == num_stages - 1:
            return costs[stage][left]
        return min(max(costs[stage][n], worst(stage + 1, left - n)) for n in range(left + 1))

    limit = worst(0, total) * (1 + 1e-9)
    if limit == inf:
        return None

    @cache
    def spread(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squared costs, minus layers) of the stages from `stage` on; infinite where one exceeds the limit."""
        if stage == num_stages - 1:
            return square(costs[stage][left]), (-left,)
        choices = []
        for n in range(left + 1):
            mine = square(costs[stage][n])
            rest, layers = spread(stage + 1, left - n) if mine < inf else (inf, ())
            choices.append((mine + rest, (-n, *layers)))
        return min(choices)

    def square(cost: float) -> float:
        if cost > limit:
            return inf
        # Whole, so that sums do not depend on the order of their terms.
        return round(1e9 * (cost / limit) ** 2) if limit else 0

    return [-n for n in spread(0, total)[1]]


def chunk_sizes(layers: int, num_chunks: int, last: float = 0.0) -> list[int]:
    """Deals a stage's layers out to its chunks, at least one each and otherwise evenly; the first ones get more.

    Args:
      layers: no fewer than chunks.
      num_chunks: of the stage.
      last: what its last chunk does beside its layers, in layers.
    """
    assert layers >= num_chunks
    sizes = [1] * num_chunks
    beside = [0.0] * (num_chunks - 1) + [last]
    for _ in range(layers - num_chunks):
        least = min(range(num_chunks), key=lambda c: sizes[c] + beside[c])
        sizes[least] += 1
    return sizes


GIB = 2**30
KEY = "pipeline.layers_per_stage"
LIMIT_KEY = "pipeline.memory_limit_gib"


@dataclass(frozen=True, eq=False)
class Prediction:
    """What stages with given numbers of layers cost.

    Attributes:
      sizes: layers of each chunk, in model order.
      work: time of a layer and of the head.
      run: the schedule with these stages, in units of the forward of one layer.
      memory: float [S], bytes on one device of each stage, from shapes; for the MPMD engine.
    """

    sizes: list[int]
    work: Work
    run: Simulation
    memory: np.ndarray

    @property
    def layers(self) -> list[int]:
        """Layers of each stage."""
        stages = self.run.table.stage_of_chunk
        return np.bincount(stages, self.sizes).astype(int).tolist()

    @property
    def slowest(self) -> float:
        """Time of the slowest stage for one microbatch, all its chunks, forward and backward."""
        return float(self.run.work.max()) / self.run.table.num_microbatches


def run_table(config: Config) -> Table:
    """The schedule's table; on the MPMD engine, where no stage waits for a tick, as the order of units on each.

    Raises:
      ScheduleError: the schedule cannot be built.
    """
    table = build_table(config)
    if config.pipeline.engine != "mpmd" or not table.lockstep:
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


def predict(config: Config, sizes: Sequence[int]) -> Prediction:
    """Simulates chunks of so many layers.

    Args:
      config: resolved; what it says about the numbers of layers is not looked at.
      sizes: layers of each chunk, in model order.

    Raises:
      ScheduleError: the schedule cannot be built.
    """
    table, times = run_table(config), work(config)
    memory = StageMemory(config, table)
    return Prediction(
        list(sizes),
        times,
        simulate(table, times.costs(sizes, table)),
        np.array([memory.bytes(s, _of_stage(table, sizes, s)) for s in range(table.num_stages)]),
    )


def uniform_sizes(config: Config) -> list[int] | None:
    """Chunks of one size, or None where the layers do not divide."""
    chunks = run_table(config).num_chunks
    size, rest = divmod(config.pipeline.parallel_layers, chunks)
    return None if rest else [size] * chunks


def plan_stages(config: Config, limit: float) -> Prediction:
    """The stages of which the slowest takes least; uniform ones where the simulator finds those no slower.

    Args:
      config: resolved, `pipeline.layers_per_stage` still auto.
      limit: bytes that a device may use; infinite if unknown.

    Raises:
      ConfigError: no choice fits the limit; the message says by how much, and what would help.
      ScheduleError: the schedule cannot be built.
    """
    table, times = run_table(config), work(config)
    memory = StageMemory(config, table)
    head_stage = int(table.stage_of_chunk[-1])

    def time(stage: int, sizes: list[int]) -> float:
        return times.layer * sum(sizes) + (times.head if stage == head_stage else 0.0)

    sizes = _deal(
        config, table, lambda s, sizes: time(s, sizes) if memory.bytes(s, sizes) <= limit else inf
    )
    if sizes is None:
        raise _does_not_fit(config, limit)
    found = [predict(config, sizes)]
    if uniform := uniform_sizes(config):
        found.insert(0, predict(config, uniform))
    # Chunks of a stage take turns with those of others, which balanced stages alone do not make
    # fast.
    return min(
        (f for f in found if (f.memory <= limit).all()), key=lambda f: round(f.run.makespan, 9)
    )


def choose_stages(config: Config, chip_bytes: float | None, say: Callable[[str], None]) -> Config:
    """The configuration with `pipeline.layers_per_stage` decided if it is auto.

    Args:
      config: resolved.
      chip_bytes: memory of a device; None if unknown.
      say: told of the decision and its reason.

    Raises:
      ConfigError: nothing fits, or the schedule cannot be built.
    """
    if config.pipeline.layers_per_stage != AUTO:
        return config
    limit = memory_limit(config, chip_bytes)
    try:
        chosen, uniform = plan_stages(config, limit), uniform_sizes(config)
    except ScheduleError as error:
        raise ConfigError(Problem("", str(error))) from error  # the message begins with the key
    for line in _reasons(chosen, predict(config, uniform) if uniform else None, limit):
        say(line)
    return update(config, {KEY: chosen.sizes, "pipeline.num_layers_per_stage": max(chosen.sizes)})


def memory_limit(config: Config, chip_bytes: float | None) -> float:
    """Bytes that `pipeline.memory_limit_gib` allows on a device, infinite if neither it nor the chip's are known."""
    return GIB * config.pipeline.memory_limit_gib or chip_bytes or inf


def _of_stage(table: Table, sizes: Sequence[int], stage: int) -> list[int]:
    return [size for size, s in zip(sizes, table.stage_of_chunk, strict=True) if s == stage]


def _deal(
    config: Config, table: Table, cost: Callable[[int, list[int]], float]
) -> list[int] | None:
    """Sizes of all chunks by `least_worst`; `cost` is of a stage and the sizes of its chunks."""
    total, times = config.pipeline.parallel_layers, work(config)
    head_stage = table.stage_of_chunk[-1]

    def chunks(stage: int, layers: int) -> list[int]:
        return chunk_sizes(
            layers, table.num_repeats, times.head / times.layer if stage == head_stage else 0.0
        )

    costs = [
        [cost(s, chunks(s, n)) if n >= table.num_repeats else inf for n in range(total + 1)]
        for s in range(table.num_stages)
    ]
    layers = least_worst(costs, total)
    if layers is None:
        return None
    sizes = [0] * table.num_chunks
    for stage, count in enumerate(layers):
        for chunk, size in enumerate(chunks(stage, count)):
            sizes[int(table.global_chunk(chunk, stage))] = size
    return sizes


def _reasons(chosen: Prediction, uniform: Prediction | None, limit: float) -> Iterator[str]:
    """What was chosen and why, two lines."""
    run, times = chosen.run, chosen.work
    against = ""
    if uniform and uniform.sizes == chosen.sizes:
        against = "; no others are faster"
    elif uniform:
        longer = uniform.run.makespan / chosen.run.makespan - 1
        against = f"; of uniform ones {uniform.slowest:.4g}, a step {longer:+.1%}"
        if (uniform.memory > limit).any():
            against += " that does not fit"
    sizes = str(chosen.sizes).replace(" ", "")
    yield f"{KEY}={sizes}: the slowest stage takes {chosen.slowest:.4g} forwards of a layer a microbatch{against}"
    of = "" if limit == inf else f" of {limit / GIB:.3g}"
    backward = [f"{(times.layer - 1) * n:.4g}" for n in chosen.layers]
    yield (
        f"predicted by stage: F {' '.join(map(str, chosen.layers))}, B {' '.join(backward)}, head {times.head:.3g}; "
        f"bubble {run.bubble_fraction:.1%}; {' '.join(f'{b / GIB:.3g}' for b in chosen.memory)}{of} GiB a device"
    )


def _does_not_fit(config: Config, limit: float) -> ConfigError:
    table = run_table(config)
    memory = StageMemory(config, table)
    sizes = _deal(config, table, memory.bytes)
    assert sizes is not None, "too few layers for the chunks"
    needed = [memory.bytes(s, _of_stage(table, sizes, s)) for s in range(table.num_stages)]
    worst = int(np.argmax(needed))
    source = LIMIT_KEY if config.pipeline.memory_limit_gib else "the chip's memory"
    message = (
        f"no choice of stages fits {limit / GIB:.3g} GiB a device ({source}): with {str(sizes).replace(' ', '')} stage "
        f"{worst} needs {needed[worst] / GIB:.3g} GiB by estimate, {(needed[worst] - limit) / GIB:.3g} GiB too much"
    )
    found = [
        _words(changes)
        for changes in _alternatives(config)
        if _fits(update(config, changes), limit)
    ]
    more = "more devices in mesh.ici.fsdp, mesh.ici.tensor or mesh.ici.stage"
    return ConfigError(Problem(KEY, f"{message}; what would help: {'; '.join([*found, more])}"))


def _words(changes: Updates) -> str:
    """As on a command line."""
    return " ".join(f"{key}={str(value).lower()}" for key, value in changes.items())


def _fits(config: Config, limit: float) -> bool:
    try:
        table = run_table(config)
    except ScheduleError:
        return False  # a CSV file is for one number of microbatches
    memory = StageMemory(config, table)
    return (
        _deal(config, table, lambda s, sizes: 0.0 if memory.bytes(s, sizes) <= limit else inf)
        is not None
    )


def _alternatives(c: Config) -> Iterator[Updates]:
    """Legal changes that may save memory."""
    if c.pipeline.remat_policy not in ("full", "custom"):
        yield {"pipeline.remat_policy": "full"}
    elif not c.pipeline.remat_layers:
        yield {"pipeline.remat_layers": True}
    twice = 2 * c.pipeline.num_microbatches
    if c.data.global_batch_size % (twice * data_shards(c)) == 0:
        yield {"pipeline.num_microbatches": twice}
    yield {"model.logit_tiles": 8 * c.model.logit_tiles}
    if c.pipeline.schedule != "1f1b":
        yield {"pipeline.schedule": "1f1b", "pipeline.num_repeats": 1}
