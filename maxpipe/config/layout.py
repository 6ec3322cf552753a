"""Derives the pipeline: engine, layers -> (stages, repeats, layers per stage), batch -> microbatches."""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatch

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.config.steps import Updates, step

STAGES = ("mesh.ici.stage", "mesh.dcn.stage")
DATA_SHARDS = ("mesh.ici.data", "mesh.dcn.data", "mesh.ici.fsdp", "mesh.dcn.fsdp")

# Schedules each engine runs, by name or pattern. The first match is what engine=auto picks.
ENGINE_SCHEDULES = {
    "circular": ("circular", "gpipe"),
    "scheduled": ("lockstep_1f1b", "*.csv"),
}
# What does the job of schedules that can be drawn and simulated, but that no engine runs.
SUBSTITUTES = {
    "1f1b": "lockstep_1f1b",
    "eager_1f1b": "lockstep_1f1b",
    "interleaved_1f1b": "lockstep_1f1b",
    "zb_*": "lockstep_1f1b",
}


def num_stages(c: Config) -> int:
    """Pipeline stages over all slices."""
    return c.mesh.ici.stage * c.mesh.dcn.stage


def data_shards(c: Config) -> int:
    """Parts into which the rows of a batch are split: data x fsdp over all slices."""
    return c.mesh.ici.data * c.mesh.dcn.data * c.mesh.ici.fsdp * c.mesh.dcn.fsdp


@step("pipeline.engine", "pipeline.schedule", *STAGES, writes=("pipeline.engine",))
def engine(c: Config) -> Updates:
    """Picks the engine, or checks that the one asked for runs the schedule."""
    asked, schedule, stages = c.pipeline.engine, c.pipeline.schedule, num_stages(c)
    if asked == "sequential" and stages > 1:
        message = f"has no stages, but mesh.*.stage makes {stages}; use engine=auto or mesh.ici.stage=1"
        raise ConfigError(Problem("pipeline.engine", f"sequential {message}"))
    if asked == "sequential" or (asked == "auto" and stages == 1):
        return {"pipeline.engine": "sequential"}
    able = [
        name for name, patterns in ENGINE_SCHEDULES.items() if any(fnmatch(schedule, p) for p in patterns)
    ]
    if not able:
        instead = next((use for pattern, use in SUBSTITUTES.items() if fnmatch(schedule, pattern)), None)
        runnable = ", ".join(pattern for patterns in ENGINE_SCHEDULES.values() for pattern in patterns)
        hint = f"{instead} does the same job" if instead else f"choose one of {runnable}"
        raise ConfigError(Problem("pipeline.schedule", f"no engine runs {schedule}; {hint}"))
    if asked == "auto":
        return {"pipeline.engine": able[0]}
    if asked not in able:
        runs = ", ".join(ENGINE_SCHEDULES[asked])
        message = f"{asked} does not run schedule {schedule} ({able[0]} does); it runs {runs}"
        raise ConfigError(Problem("pipeline.engine", message))
    return {}


@step("pipeline.engine", "pipeline.overlap_slots")
def overlap_slots(c: Config) -> None:
    if c.pipeline.engine == "circular" and c.pipeline.overlap_slots:
        message = (
            "only the scheduled engine has forward and backward slots to overlap; use schedule=lockstep_1f1b"
        )
        raise ConfigError(Problem("pipeline.overlap_slots", message))


@step(
    "model.num_layers", "pipeline.engine", "pipeline.num_repeats", "pipeline.num_layers_per_stage",
    "pipeline.layers_per_stage", *STAGES,
    writes=("pipeline.num_repeats", "pipeline.num_layers_per_stage", "pipeline.layers_per_stage"),
)  # fmt: skip
def layers(c: Config) -> Updates:
    """Splits num_layers into stages x repeats x layers per stage."""
    if c.pipeline.engine == "sequential":
        return _layout(1, c.model.num_layers, [])
    if c.pipeline.layers_per_stage:
        return _uneven_layers(c)
    stages, total = num_stages(c), c.model.num_layers
    repeats, per_stage = c.pipeline.num_repeats, c.pipeline.num_layers_per_stage
    if c.pipeline.schedule == "gpipe":
        if repeats not in (-1, 1):
            message = "schedule gpipe has one chunk per stage: num_repeats=1; schedule=circular repeats"
            raise ConfigError(Problem("pipeline.num_repeats", f"{message}; got {repeats}"))
        repeats = 1
    if repeats == -1 and per_stage == -1:
        per_stage = 1
    if repeats == -1:
        repeats = max(1, total // (stages * per_stage))
    elif per_stage == -1:
        per_stage = max(1, total // (stages * repeats))
    if stages * repeats * per_stage != total:
        raise _indivisible(c, repeats, per_stage)
    return _layout(repeats, per_stage, [])


def _layout(repeats: int, per_stage: int, uneven: list[int]) -> Updates:
    return {
        "pipeline.num_repeats": repeats,
        "pipeline.num_layers_per_stage": per_stage,
        "pipeline.layers_per_stage": uneven,
    }


def _uneven_layers(c: Config) -> Updates:
    chunks, stages, total = c.pipeline.layers_per_stage, num_stages(c), c.model.num_layers
    repeats = max(1, min(round(len(chunks) / stages), total // stages))
    example = f"pipeline.layers_per_stage={_even_split(total, repeats * stages)}"
    if total < stages:
        raise ConfigError(Problem("model.num_layers", f"{total} layers are too few for {stages} stages"))
    if min(chunks) < 1:
        message = f"every chunk needs at least one layer; got {chunks}"
    elif len(chunks) % stages:
        message = f"{len(chunks)} chunks do not divide into {stages} stages; a split that does: {example}"
    elif sum(chunks) != total:
        message = f"adds up to {sum(chunks)}, but model.num_layers={total}; a split that fits: {example}"
    elif c.pipeline.schedule == "gpipe" and len(chunks) != stages:
        message = f"schedule gpipe has one chunk per stage, so {stages} entries; got {len(chunks)}"
    else:
        return _layout(len(chunks) // stages, max(chunks), chunks)
    raise ConfigError(Problem("pipeline.layers_per_stage", message))


def _even_split(total: int, parts: int) -> str:
    sizes = [total // parts + (i < total % parts) for i in range(parts)]
    return str(sizes).replace(" ", "")


def _indivisible(c: Config, repeats: int, per_stage: int) -> ConfigError:
    """The error for layers that do not divide, with the nearest choices that do, ready to paste."""
    stages, total = num_stages(c), c.model.num_layers
    if c.pipeline.num_layers_per_stage == -1 and c.pipeline.num_repeats != -1:
        key, split = "pipeline.num_repeats", f"{stages} stages x {repeats} repeats"
    elif c.pipeline.num_repeats == -1:
        key, split = "pipeline.num_layers_per_stage", f"{stages} stages x {per_stage} layers per stage"
    else:
        key, split = (
            "pipeline.num_repeats",
            f"{stages} stages x {repeats} repeats x {per_stage} layers per stage",
        )
    if c.pipeline.schedule == "gpipe":
        key, split = "model.num_layers", f"{stages} stages"
    chunk = math.prod(
        n for n in (stages, repeats if "repeats" in split else 1, per_stage if "layers" in split else 1)
    )
    options = []
    if total % stages == 0 and c.pipeline.schedule != "gpipe":
        splits = [
            (v, total // stages // v) for v in range(1, total // stages + 1) if total // stages % v == 0
        ]
        splits.sort(key=lambda split: _distance(split[0], repeats) + _distance(split[1], per_stage))
        options += [f"pipeline.num_repeats={v} pipeline.num_layers_per_stage={l}" for v, l in splits[:3]]
    options.append(f"model.num_layers={' or '.join(str(n) for n in _multiples_around(total, chunk))}")
    if total >= stages:
        options.append(f"pipeline.layers_per_stage={_even_split(total, stages)}")
    message = f"model.num_layers={total} does not divide into {split}; nearest legal: {'; '.join(options)}"
    return ConfigError(Problem(key, message))


@step(
    "pipeline.engine", "pipeline.num_microbatches", "pipeline.delay_activation_forwarding", *STAGES,
    writes=("pipeline.num_microbatches",),
)  # fmt: skip
def microbatches(c: Config) -> Updates:
    """Derives the number of microbatches and checks what the engine asks of it."""
    if c.pipeline.engine == "sequential":
        return {"pipeline.num_microbatches": max(1, c.pipeline.num_microbatches)}
    stages, count = num_stages(c), c.pipeline.num_microbatches
    least = 2 * stages if c.pipeline.delay_activation_forwarding else stages
    if count == -1:
        return {"pipeline.num_microbatches": least}
    if c.pipeline.engine == "circular" and (count % stages or count < least):
        reason = " with delay_activation_forwarding" if least > stages else ""
        near = " or ".join(str(n) for n in _multiples_around(count, stages) if n >= least) or str(least)
        message = f"the circular engine needs a multiple of the {stages} stages, at least {least}{reason}"
        raise ConfigError(
            Problem("pipeline.num_microbatches", f"{message}; got {count}, nearest legal: {near}")
        )
    return {}


@step("data.global_batch_size", "pipeline.engine", "pipeline.num_microbatches", *STAGES, *DATA_SHARDS)
def train_batch(c: Config) -> None:
    batch, count, shards = c.data.global_batch_size, c.pipeline.num_microbatches, data_shards(c)
    if batch % (count * shards):
        sizes = " or ".join(str(n) for n in _multiples_around(batch, count * shards))
        factors = f"num_microbatches x data x fsdp = {count} x {_product(c, 'data')} x {_product(c, 'fsdp')}"
        message = f"{batch} is not divisible by {factors} = {count * shards}; nearest legal: {sizes}"
        raise ConfigError(Problem("data.global_batch_size", message + _other_counts(c, batch, shards)))


@step("eval.every", "eval.global_batch_size", "data.global_batch_size", *DATA_SHARDS)
def eval_batch(c: Config) -> None:
    batch, shards = c.eval.global_batch_size, data_shards(c)
    if c.eval.every and batch != c.data.global_batch_size and batch % shards:
        sizes = " or ".join(str(n) for n in _multiples_around(batch, shards))
        factors = f"data x fsdp = {_product(c, 'data')} x {_product(c, 'fsdp')} = {shards}"
        message = f"{batch} is not divisible by {factors}; nearest legal: {sizes}"
        raise ConfigError(Problem("eval.global_batch_size", message))


def _product(c: Config, axis: str) -> int:
    return getattr(c.mesh.ici, axis) * getattr(c.mesh.dcn, axis)


def _other_counts(c: Config, batch: int, shards: int) -> str:
    """The numbers of microbatches nearest to the one in use that fit the batch as it is."""
    if batch % shards:
        return ""
    circular = c.pipeline.engine == "circular"
    least = num_stages(c) * (1 + c.pipeline.delay_activation_forwarding) if circular else 1
    unit = num_stages(c) if circular else 1
    fits = _closest(
        (n for n in range(least, batch // shards + 1) if n % unit == 0 and batch // shards % n == 0),
        lambda n: _distance(n, c.pipeline.num_microbatches),
    )
    return f", or pipeline.num_microbatches={' or '.join(map(str, fits))}" if fits else ""


def _closest(values: Iterable[int], distance: Callable[[int], float]) -> list[int]:
    return sorted(sorted(values, key=distance)[:2])


def _multiples_around(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [n for n in (below, below + unit) if n > 0 and n != value]


def _distance(a: int, b: int) -> float:
    return abs(math.log(a / b))


STEPS = (engine, overlap_slots, layers, microbatches, train_batch, eval_batch)
