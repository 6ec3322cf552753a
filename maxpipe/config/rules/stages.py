"""Derive the engine, and split layers into stages x repeats x layers per stage."""

import math
import os

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import OWN_VARIANTS
from maxpipe.config.options import is_set
from maxpipe.config.rules.rule import Updates, distance, divisors, multiples_around, rule
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO, nearest

STAGE_AXES = ("mesh.ici.stage", "mesh.dcn.stage")
_LAYOUT = ("pipeline.num_repeats", "pipeline.num_layers_per_stage", "pipeline.layers_per_stage")
_PARALLEL_LAYERS = "pipeline.parallel_layers"


def is_csv(schedule: str) -> bool:
    """Return whether `pipeline.schedule` names a file; no schedule's own name ends in .csv."""
    return schedule.lower().endswith(".csv")


def misnamed_table(schedule: str) -> str:
    """Return what is wrong with the name of an existing file; "" if there is no such file."""
    if not os.path.isfile(schedule):
        return ""
    return f"{schedule} is a file; the name of a table's file ends in .csv"


def engines_of(schedule: str) -> list[str]:
    """Return the engines that run a schedule or a CSV file, the preferred one first."""
    if is_csv(schedule):
        return [name for name, engine in ENGINES.items() if engine.runs_csv]
    engines = SCHEDULES[schedule].engines if schedule in SCHEDULES else ()
    return [name for name in engines if name in ENGINES]


def schedules_of(engine: str) -> list[str]:
    """Return the schedules that an engine runs, with `*.csv` for files."""
    names = [name for name, schedule in SCHEDULES.items() if engine in schedule.engines]
    return [*names, "*.csv"] if ENGINES[engine].runs_csv else names


def fixed_repeats(schedule: str) -> int | None:
    """Return the chunks per stage that a schedule has; None if any number is legal."""
    return SCHEDULES[schedule].repeats if schedule in SCHEDULES else None


def num_stages(c: Config) -> int:
    """Return the number of pipeline stages over all slices."""
    return c.mesh.size("stage")


def chunk_layers(c: Config) -> list[int]:
    """Return the number of layers of each chunk in model order; `c` is resolved, its stages chosen.

    Layers outside the pipeline are part of the first or the last chunk if stages have programs of
    their own, and otherwise of no chunk.
    """
    pipeline, chunks = c.pipeline, num_stages(c) * c.pipeline.num_repeats
    sizes = list(pipeline.layers_per_stage or [pipeline.num_layers_per_stage] * chunks)
    if not ENGINES[pipeline.engine].one_program:
        is_before = pipeline.outside_layers == "before"
        sizes[0 if is_before else -1] += c.model.stacked_layers - pipeline.parallel_layers
    return sizes


@rule("pipeline.schedule")
def check_schedule(c: Config) -> None:
    """Check that the schedule is in the catalogue or a CSV file."""
    name, names = c.pipeline.schedule, [*SCHEDULES]
    if is_csv(name):
        if not os.path.isfile(name):
            raise ConfigError(Problem("pipeline.schedule", f"there is no file {name}"))
    elif name not in names:
        legal = f"{', '.join(names)} ({OWN_VARIANTS}){nearest(name, names)}"
        message = misnamed_table(name) or f"{name!r} is neither a CSV file nor one of {legal}"
        raise ConfigError(Problem("pipeline.schedule", message))


@rule("pipeline.engine", "pipeline.schedule", *STAGE_AXES, writes=("pipeline.engine",))
def derive_engine(c: Config) -> Updates:
    """Pick the engine, or check that the one that the user names runs the schedule."""
    name, schedule, stages = c.pipeline.engine, c.pipeline.schedule, num_stages(c)
    if name == "auto" and stages == 1:
        return {"pipeline.engine": "sequential"}
    if name != "auto" and not ENGINES[name].has_stages:
        if stages == 1:
            return {}
        message = (
            f"{name} has no stages, but mesh.*.stage makes {stages}; "
            "use engine=auto or mesh.ici.stage=1"
        )
        raise ConfigError(Problem("pipeline.engine", message))
    able = engines_of(schedule)
    if not able:
        runnable = [schedule for schedule in SCHEDULES if engines_of(schedule)]
        message = f"no engine runs {schedule}; choose one of {', '.join([*runnable, '*.csv'])}"
        raise ConfigError(Problem("pipeline.schedule", message))
    if name == "auto":
        return {"pipeline.engine": able[0]}
    if name not in able:
        message = (
            f"{name} does not run schedule {schedule} ({able[0]} does); "
            f"it runs {', '.join(schedules_of(name))}"
        )
        raise ConfigError(Problem("pipeline.engine", message))
    return {}


@rule(
    "model.num_layers",
    "model.first_dense_layers",
    "pipeline.engine",
    _PARALLEL_LAYERS,
    "pipeline.outside_layers",
    writes=(_PARALLEL_LAYERS,),
)
def derive_parallel_layers(c: Config) -> Updates:
    """Derive how many layers the pipeline has; check that the engine can run the others."""
    engine = ENGINES[c.pipeline.engine]
    total, layers = c.model.stacked_layers, c.pipeline.parallel_layers
    if layers == -1 or not engine.has_stages:
        layers = total
    if layers > total:
        message = (
            f"{layers} is more than {_stacked(c)}; nearest legal: {total}, or -1 for all layers"
        )
        raise ConfigError(Problem(_PARALLEL_LAYERS, message))
    if layers < total and not engine.takes(_PARALLEL_LAYERS):
        message = (
            f"{layers} is not for the {c.pipeline.engine} engine, which has no layers outside the "
            f"pipeline; use {total} or -1, or pipeline.schedule=circular, lockstep_1f1b or 1f1b"
        )
        raise ConfigError(Problem(_PARALLEL_LAYERS, message))
    if layers == total and c.pipeline.outside_layers == "before" and engine.has_stages:
        message = (
            f"before needs layers outside the pipeline; set {_PARALLEL_LAYERS} below {_stacked(c)}"
        )
        raise ConfigError(Problem("pipeline.outside_layers", message))
    return {_PARALLEL_LAYERS: layers}


@rule(
    "model",
    "data.sequence_length",
    "pipeline.engine",
    _PARALLEL_LAYERS,
    "pipeline.schedule",
    "pipeline.remat_policy",
    *_LAYOUT,
    *STAGE_AXES,
    writes=_LAYOUT,
)
def derive_layout(c: Config) -> Updates:
    """Split the pipeline's layers into stages x repeats x layers per stage."""
    if not ENGINES[c.pipeline.engine].has_stages:
        return _layout(1, c.model.stacked_layers, [])
    if c.pipeline.layers_per_stage == AUTO:
        return _automatic_layers(c)
    if c.pipeline.layers_per_stage:
        return _uneven_layers(c)
    return _even_layers(c)


def _stacked(c: Config) -> str:
    """Return the number of layers that a pipeline can have, and the keys that say so."""
    name = "model.num_layers"
    if c.model.first_dense_layers:
        name = "model.num_layers - model.first_dense_layers"
    return f"{name}={c.model.stacked_layers}"


def _layout(repeats: int, per_stage: int, uneven: list[int]) -> Updates:
    return {
        "pipeline.num_repeats": repeats,
        "pipeline.num_layers_per_stage": per_stage,
        "pipeline.layers_per_stage": uneven,
    }


def _even_layers(c: Config) -> Updates:
    """Derive the repeats and the layers per stage, whichever are -1."""
    stages, total, schedule = num_stages(c), c.pipeline.parallel_layers, c.pipeline.schedule
    repeats, per_stage = c.pipeline.num_repeats, c.pipeline.num_layers_per_stage
    if fixed := fixed_repeats(schedule):
        if repeats not in (-1, fixed):
            message = (
                f"schedule {schedule} has {_chunks(fixed)} per stage, not {repeats}; "
                f"use pipeline.num_repeats={fixed}, or pipeline.schedule=circular, lockstep_1f1b "
                "or interleaved_1f1b"
            )
            raise ConfigError(Problem("pipeline.num_repeats", message))
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


def _uneven_layers(c: Config) -> Updates:
    """Check that the chunks of `pipeline.layers_per_stage` add up and divide over the stages."""
    chunks, stages, total = c.pipeline.layers_per_stage, num_stages(c), c.pipeline.parallel_layers
    if total < stages:
        raise ConfigError(Problem(_total_key(c), f"{total} layers are too few for {stages} stages"))
    repeats = max(1, min(round(len(chunks) / stages), total // stages))
    example = f"pipeline.layers_per_stage={_even_split(total, repeats * stages)}"
    fixed = fixed_repeats(c.pipeline.schedule)
    if min(chunks) < 1:
        message = f"every chunk needs at least one layer; got {chunks}"
    elif len(chunks) % stages:
        message = (
            f"{len(chunks)} chunks do not divide into {stages} stages; a split that does: {example}"
        )
    elif sum(chunks) != total:
        message = f"adds up to {sum(chunks)}, but {_pipelined(c)}; a split that fits: {example}"
    elif fixed and len(chunks) != stages * fixed:
        message = (
            f"schedule {c.pipeline.schedule} has {_chunks(fixed)} per stage, "
            f"so {stages * fixed} entries; got {len(chunks)}"
        )
    else:
        return _layout(len(chunks) // stages, max(chunks), chunks)
    raise ConfigError(Problem("pipeline.layers_per_stage", message))


def _automatic_layers(c: Config) -> Updates:
    """Derive the number of chunks; `planning.auto_stages` decides how many layers each gets."""
    total, stages = c.model.stacked_layers, num_stages(c)
    if not ENGINES[c.pipeline.engine].auto_stages:
        able = [name for name, engine in ENGINES.items() if engine.auto_stages]
        message = (
            f"auto is for the {' or '.join(able)} engine; on the {c.pipeline.engine} engine all "
            "stages share the head's work; leave it empty, or use a schedule that "
            f"{' or '.join(able)} runs"
        )
        raise ConfigError(Problem("pipeline.layers_per_stage", message))
    if (inside := c.pipeline.parallel_layers) < total:
        message = (
            f"auto distributes all layers, and {_PARALLEL_LAYERS}={inside} gives one stage "
            f"{total - inside} more; use {_PARALLEL_LAYERS}=-1, or list the layers of each chunk"
        )
        raise ConfigError(Problem("pipeline.layers_per_stage", message))
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
    """Return the error for layers that do not divide, with the nearest legal choices to paste."""
    stages, total = num_stages(c), c.pipeline.parallel_layers
    factors = {"stages": stages}
    if is_set(c, "pipeline.num_repeats"):
        factors["repeats"] = repeats
    if is_set(c, "pipeline.num_layers_per_stage"):
        factors["layers per stage"] = per_stage
    unit = math.prod(factors.values())
    choices = _even_choices(c, repeats, per_stage)
    # config.json may fix model.num_layers, and with first dense layers it is another number.
    is_all = _total_key(c) == "model.num_layers"
    if not (is_all and (c.model.from_hf or c.model.first_dense_layers)):
        choices.append(f"{_total_key(c)}={multiples_around(total, unit)}")
    # If each stage has a program of its own, uneven stages cost nothing and balance better.
    engine = ENGINES[c.pipeline.engine]
    has_outside = engine.one_program and engine.takes(_PARALLEL_LAYERS)
    if has_outside and total == c.model.stacked_layers and total > unit:
        inside = total // unit * unit
        choices.append(f"{_PARALLEL_LAYERS}={inside} (the others run outside the pipeline)")
    chunks = stages * factors.get("repeats", 1)
    if total >= chunks:
        choices.append(f"pipeline.layers_per_stage={_even_split(total, chunks)}")
    keys = [
        key for key in ("pipeline.num_repeats", "pipeline.num_layers_per_stage") if is_set(c, key)
    ]
    written = " x ".join(f"{count} {name}" for name, count in factors.items())
    message = (
        f"{_pipelined(c)} does not divide into {written}; "
        f"nearest legal: {'; '.join(choices) or 'fewer stages or repeats'}"
    )
    return ConfigError(Problem(keys[0] if keys else _total_key(c), message))


def _even_choices(c: Config, repeats: int, per_stage: int) -> list[str]:
    """Return up to three even splits of the layers, those nearest to the one that fails."""
    layers, remainder = divmod(c.pipeline.parallel_layers, num_stages(c))
    if remainder:
        return []
    fixed = fixed_repeats(c.pipeline.schedule)
    splits = [(v, layers // v) for v in ([fixed] if fixed else divisors(layers)) if layers % v == 0]
    splits.sort(key=lambda split: distance(split[0], repeats) + distance(split[1], per_stage))
    return [f"pipeline.num_repeats={v} pipeline.num_layers_per_stage={l}" for v, l in splits[:3]]


def _total_key(c: Config) -> str:
    """Return the key that says how many layers the pipeline has."""
    has_all = c.pipeline.parallel_layers == c.model.stacked_layers
    return "model.num_layers" if has_all else _PARALLEL_LAYERS


def _pipelined(c: Config) -> str:
    """Return the number of the pipeline's layers, and the keys that say so."""
    is_all = _total_key(c) == "model.num_layers"
    return _stacked(c) if is_all else f"{_PARALLEL_LAYERS}={c.pipeline.parallel_layers}"


STAGE_RULES = (check_schedule, derive_engine, derive_parallel_layers, derive_layout)
