"""Derives the engine, and layers -> stages x repeats x layers per stage."""

import math

from maxpipe.config.catalog import CSV_ENGINES, SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.nearest import distance, divisors, multiples_around
from maxpipe.config.options import get, is_set
from maxpipe.config.rules.rule import Updates, rule
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO

STAGES = ("mesh.ici.stage", "mesh.dcn.stage")

# What the sequential engine does not read.
_OF_PIPELINES = (
    "schedule",
    "num_repeats",
    "num_layers_per_stage",
    "layers_per_stage",
    "parallel_layers",
    "outside_layers",
    "delay_activation_forwarding",
    "overlap_slots",
    "skip_idle",
    "fsdp_gather",
    "scan_iterations",
    "scan_repeats",
    "scan_layers_per_stage",
    "remat_iterations",
    "remat_layers",
    "memory_limit_gib",
)

_SPLIT = ("pipeline.num_repeats", "pipeline.num_layers_per_stage", "pipeline.layers_per_stage")


def schedules_of(engine: str) -> list[str]:
    """Return the schedules that an engine runs, `*.csv` for files."""
    names = [name for name, facts in SCHEDULES.items() if engine in facts.engines]
    return [*names, "*.csv"] if engine in CSV_ENGINES else names


def fixed_repeats(schedule: str) -> int | None:
    """Return the chunks per stage that a schedule has, None if any number will do."""
    return SCHEDULES[schedule].repeats if schedule in SCHEDULES else None


def num_stages(c: Config) -> int:
    """Pipeline stages over all slices."""
    return c.mesh.size("stage")


def ignored_options(asked: Config, resolved: Config) -> list[str]:
    """A line for `notes` if options of pipelines were given and there is no pipeline.

    Args:
      asked: before derivation, when what was not given has its default.
      resolved: what became of it.
    """
    given = [
        f"{key}={get(asked, key)}"
        for key in (f"pipeline.{name}" for name in _OF_PIPELINES)
        if is_set(asked, key)
    ]
    if resolved.pipeline.engine != "sequential" or not given:
        return []
    verb = "has" if len(given) == 1 else "have"
    return [
        f"{', '.join(given)} {verb} no effect: there is one stage; mesh.ici.stage=2 or more makes a pipeline"
    ]


@rule("pipeline.engine", "pipeline.schedule", *STAGES, writes=("pipeline.engine",))
def engine(c: Config) -> Updates:
    """Picks the engine, or checks that the one asked for runs the schedule."""
    asked, schedule, stages = c.pipeline.engine, c.pipeline.schedule, num_stages(c)
    if asked == "sequential" and stages > 1:
        message = (
            f"has no stages, but mesh.*.stage makes {stages}; use engine=auto or mesh.ici.stage=1"
        )
        raise ConfigError(Problem("pipeline.engine", f"sequential {message}"))
    if asked == "sequential" or (asked == "auto" and stages == 1):
        return {"pipeline.engine": "sequential"}
    able = (
        CSV_ENGINES
        if schedule.endswith(".csv")
        else SCHEDULES[schedule].engines
        if schedule in SCHEDULES
        else ()
    )
    if not able:
        runnable = ", ".join([*SCHEDULES, "*.csv"])
        raise ConfigError(
            Problem("pipeline.schedule", f"no engine runs {schedule}; choose one of {runnable}")
        )
    if asked == "auto":
        return {"pipeline.engine": able[0]}
    if asked not in able:
        runs = ", ".join(schedules_of(asked))
        message = f"{asked} does not run schedule {schedule} ({able[0]} does); it runs {runs}"
        raise ConfigError(Problem("pipeline.engine", message))
    return {}


@rule(
    "model.num_layers",
    "pipeline.engine",
    "pipeline.parallel_layers",
    "pipeline.outside_layers",
    writes=("pipeline.parallel_layers",),
)
def parallel_layers(c: Config) -> Updates:
    """How many layers the pipeline has."""
    total, asked = c.model.num_layers, c.pipeline.parallel_layers
    if asked == -1 or c.pipeline.engine == "sequential":
        asked = total
    key = "pipeline.parallel_layers"
    if asked > total:
        message = f"{asked} is more than model.num_layers={total}; nearest legal: {total}, or -1 for all layers"
        raise ConfigError(Problem(key, message))
    if asked < total and c.pipeline.engine in ("scheduled", "mpmd"):
        message = f"the {c.pipeline.engine} engine has no layers outside the pipeline"
        remedy = f"use {total} or -1, or the circular engine (pipeline.schedule=circular)"
        raise ConfigError(Problem(key, f"{message}; {remedy}"))
    if (
        asked == total
        and c.pipeline.outside_layers == "before"
        and c.pipeline.engine != "sequential"
    ):
        message = (
            f"before needs layers outside the pipeline; set {key} below model.num_layers={total}"
        )
        raise ConfigError(Problem("pipeline.outside_layers", message))
    return {key: asked}


@rule(
    "model",
    "data.sequence_length",
    "pipeline.engine",
    "pipeline.parallel_layers",
    "pipeline.schedule",
    "pipeline.remat_policy",
    *_SPLIT,
    *STAGES,
    writes=_SPLIT,
)
def layers(c: Config) -> Updates:
    """Splits num_layers into stages x repeats x layers per stage."""
    if c.pipeline.engine == "sequential":
        return _layout(1, c.model.num_layers, [])
    if c.pipeline.layers_per_stage == AUTO:
        return _automatic_layers(c)
    if c.pipeline.layers_per_stage:
        return _uneven_layers(c)
    stages, total = num_stages(c), c.pipeline.parallel_layers
    repeats, per_stage = c.pipeline.num_repeats, c.pipeline.num_layers_per_stage
    schedule = c.pipeline.schedule
    if fixed := fixed_repeats(schedule):
        if repeats not in (-1, fixed):
            message = f"schedule {schedule} has {_chunks(fixed)} per stage, not {repeats}"
            hint = f"pipeline.num_repeats={fixed}, or pipeline.schedule=circular, lockstep_1f1b or interleaved_1f1b"
            raise ConfigError(Problem("pipeline.num_repeats", f"{message}; use {hint}"))
        repeats = fixed
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
    chunks, stages, total = c.pipeline.layers_per_stage, num_stages(c), c.pipeline.parallel_layers
    repeats = max(1, min(round(len(chunks) / stages), total // stages))
    example = f"pipeline.layers_per_stage={_even_split(total, repeats * stages)}"
    if total < stages:
        raise ConfigError(Problem(_total_key(c), f"{total} layers are too few for {stages} stages"))
    if min(chunks) < 1:
        message = f"every chunk needs at least one layer; got {chunks}"
    elif len(chunks) % stages:
        message = (
            f"{len(chunks)} chunks do not divide into {stages} stages; a split that does: {example}"
        )
    elif sum(chunks) != total:
        message = (
            f"adds up to {sum(chunks)}, but {_total_key(c)}={total}; a split that fits: {example}"
        )
    elif len(chunks) != stages * (
        fixed := fixed_repeats(c.pipeline.schedule) or len(chunks) // stages
    ):
        has = f"schedule {c.pipeline.schedule} has {_chunks(fixed)} per stage"
        message = f"{has}, so {stages * fixed} entries; got {len(chunks)}"
    else:
        return _layout(len(chunks) // stages, max(chunks), chunks)
    raise ConfigError(Problem("pipeline.layers_per_stage", message))


def _automatic_layers(c: Config) -> Updates:
    """The number of chunks; how many layers each gets is decided in `pipeline.auto_stages`, with the table at hand."""
    key, total, stages = "pipeline.layers_per_stage", c.model.num_layers, num_stages(c)
    if c.pipeline.engine != "mpmd":
        message = f"auto is for the mpmd engine; on the {c.pipeline.engine} engine all stages share the head's work"
        raise ConfigError(
            Problem(key, f"{message}; leave it empty, or use a schedule that mpmd runs")
        )
    repeats = fixed_repeats(c.pipeline.schedule) or max(1, c.pipeline.num_repeats)
    if total < stages * repeats:
        message = f"{total} layers are too few for {stages} stages x {repeats} repeats"
        raise ConfigError(Problem("model.num_layers", message))
    return _layout(repeats, -1, AUTO)


def _chunks(count: int) -> str:
    return "one chunk" if count == 1 else f"{count} chunks"


def _even_split(total: int, parts: int) -> str:
    sizes = [total // parts + (i < total % parts) for i in range(parts)]
    return str(sizes).replace(" ", "")


def _indivisible(c: Config, repeats: int, per_stage: int) -> ConfigError:
    """The error for layers that do not divide, with the nearest choices that do, ready to paste."""
    stages, total, fixed = (
        num_stages(c),
        c.pipeline.parallel_layers,
        fixed_repeats(c.pipeline.schedule),
    )
    factors = {"stages": stages}
    if c.pipeline.num_repeats != -1:
        factors["repeats"] = repeats
    if c.pipeline.num_layers_per_stage != -1:
        factors["layers per stage"] = per_stage
    chunks, extra = divmod(total, stages)
    repeat_choices = [fixed] if fixed else divisors(chunks)
    splits = [] if extra else [(v, chunks // v) for v in repeat_choices if chunks % v == 0]
    splits.sort(key=lambda split: distance(split[0], repeats) + distance(split[1], per_stage))
    options = [f"pipeline.num_repeats={v} pipeline.num_layers_per_stage={l}" for v, l in splits[:3]]
    chunk = math.prod(factors.values())
    options.append(f"{_total_key(c)}={multiples_around(total, chunk)}")
    if c.pipeline.engine == "circular" and total == c.model.num_layers and total > chunk:
        options.append(
            f"pipeline.parallel_layers={total // chunk * chunk} (the others run outside the pipeline)"
        )
    parts = stages * factors.get("repeats", 1)
    if total >= parts:
        options.append(f"pipeline.layers_per_stage={_even_split(total, parts)}")
    given = [
        key
        for key in ("pipeline.num_repeats", "pipeline.num_layers_per_stage")
        if get(c, key) != -1
    ]
    written = " x ".join(f"{count} {what}" for what, count in factors.items())
    message = f"{_total_key(c)}={total} does not divide into {written}; nearest legal: {'; '.join(options)}"
    return ConfigError(Problem(given[0] if given else _total_key(c), message))


def _total_key(c: Config) -> str:
    """The key that says how many layers the pipeline has."""
    every = c.pipeline.parallel_layers == c.model.num_layers
    return "model.num_layers" if every else "pipeline.parallel_layers"


RULES = (engine, parallel_layers, layers)
