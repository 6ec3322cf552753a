"""Derive the engine; split layers over stages, and batches over microbatches and devices."""

import csv
import math
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.imports import OWN_VARIANTS
from maxpipe.config.options import get, is_set
from maxpipe.config.rules.rule import (
    Derived,
    Updates,
    Wrong,
    check,
    derive,
    distance,
    divisors,
    multiples_around,
    rules_in,
)
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO, nearest

_ROW_AXES = ("data", "fsdp", "expert")
MOST_BATCHES = 2**31 - 1  # of each source, where an evaluation has all
SHARD_AXES = tuple(f"mesh.{level}.{axis}" for axis in _ROW_AXES for level in ("ici", "dcn"))
_LAYOUT = ("pipeline.num_repeats", "pipeline.num_layers_per_stage", "pipeline.layers_per_stage")
_PARALLEL_LAYERS = "pipeline.parallel_layers"
# Column of each kind within a lockstep tick of a CSV file.
LOCKSTEP_COLUMN = {"F": 0, "B": 1, "I": 1, "W": 2}


def is_csv(schedule: str) -> bool:
    """Return whether `pipeline.schedule` names a file; no schedule's own name ends in .csv."""
    return schedule.lower().endswith(".csv")


def engines_of(schedule: str) -> list[str]:
    """Return the engines that run a schedule or a CSV file, the preferred one first."""
    if is_csv(schedule):
        able = [name for name, engine in ENGINES.items() if engine.runs_csv]
        in_ticks = _has_lockstep_ticks(schedule)
        return sorted(able, key=lambda engine: ENGINES[engine].lockstep != in_ticks)
    engines = SCHEDULES[schedule].engines if schedule in SCHEDULES else ()
    return [name for name in engines if name in ENGINES]


def _has_lockstep_ticks(path: str) -> bool:
    """Return whether the columns of a CSV file are lockstep ticks. Another file's columns have one
    unit each, and a program that computes all kinds in each of them would idle most of the time.
    """
    try:
        rows = [*csv.reader(Path(path).read_text("utf-8-sig").splitlines())]
    except (OSError, ValueError, csv.Error):
        return True  # whoever reads the units says what is wrong
    cells = [(column, cell) for row in rows for column, cell in enumerate(row)]
    return in_lockstep([(at, k) for at, cell in cells for k in re.findall(r"\d([FBIW])\d", cell)])


def in_lockstep(units: Sequence[tuple[int, str]]) -> bool:
    """Return whether units, given by column and kind, are in the columns of their kinds."""
    width = 3 if any(kind == "W" for _, kind in units) else 2
    return all(column % width == LOCKSTEP_COLUMN[kind] for column, kind in units)


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


@check
def check_schedule(c: Config) -> Wrong:
    name, names = c.pipeline.schedule, [*SCHEDULES]
    if is_csv(name) and not os.path.isfile(name):
        yield "pipeline.schedule", f"there is no file {name}"
    elif not is_csv(name) and name not in names:
        legal = f"{', '.join(names)} ({OWN_VARIANTS}){nearest(name, names)}"
        yield "pipeline.schedule", f"{name!r} is neither a file NAME.csv nor one of {legal}"


@derive("pipeline.engine")
def derive_engine(c: Config) -> Derived:
    """Pick the engine, or check that the one that the user names runs the schedule."""
    name, schedule, stages = c.pipeline.engine, c.pipeline.schedule, num_stages(c)
    if name == "auto" and stages == 1:
        return {"pipeline.engine": "sequential"}
    able = engines_of(schedule)
    if name != "auto" and not ENGINES[name].has_stages:
        if stages > 1:
            remedy = "use engine=auto or mesh.ici.stage=1"
            message = f"{name} has no stages, but mesh.*.stage makes {stages}; {remedy}"
            yield "pipeline.engine", message
    elif not able:
        runnable = [*(other for other in SCHEDULES if engines_of(other)), "*.csv"]
        message = f"no engine runs {schedule}; choose one of {', '.join(runnable)}"
        yield "pipeline.schedule", message
    elif name == "auto":
        return {"pipeline.engine": able[0]}
    elif name not in able:
        runs = f"it runs {', '.join(schedules_of(name))}"
        message = f"{name} does not run schedule {schedule} ({able[0]} does); {runs}"
        yield "pipeline.engine", message
    return {}


@derive(_PARALLEL_LAYERS)
def derive_parallel_layers(c: Config) -> Derived:
    engine = ENGINES[c.pipeline.engine]
    total, layers = c.model.stacked_layers, c.pipeline.parallel_layers
    if layers == -1 or not engine.has_stages:
        layers = total
    if layers > total:
        yield _PARALLEL_LAYERS, f"{layers} is more than {_stacked(c)}; -1 = all layers"
    elif layers == total and c.pipeline.outside_layers == "before" and engine.has_stages:
        remedy = f"set {_PARALLEL_LAYERS} below {_stacked(c)}"
        yield "pipeline.outside_layers", f"before needs layers outside the pipeline; {remedy}"
    return {_PARALLEL_LAYERS: layers}


def _stacked(c: Config) -> str:
    """Return the number of layers that a pipeline can have, and the keys that say so."""
    first = " - model.first_dense_layers" if c.model.first_dense_layers else ""
    return f"model.num_layers{first}={c.model.stacked_layers}"


def _pipelined(c: Config) -> tuple[str, str]:
    inside = c.pipeline.parallel_layers
    if inside == c.model.stacked_layers:
        return "model.num_layers", _stacked(c)
    return _PARALLEL_LAYERS, f"{_PARALLEL_LAYERS}={inside}"


@derive(*_LAYOUT)
def derive_layout(c: Config) -> Derived:
    """Split the pipeline's layers into stages x repeats x layers per stage."""
    if not ENGINES[c.pipeline.engine].has_stages:
        return _layout(1, c.model.stacked_layers, [])
    if c.pipeline.layers_per_stage == AUTO:
        return (yield from _automatic_layers(c))
    if c.pipeline.layers_per_stage:
        return (yield from _uneven_layers(c))
    return (yield from _even_layers(c))


def _layout(repeats: int, per_stage: int, uneven: list[int]) -> Updates:
    return dict(zip(_LAYOUT, (repeats, per_stage, uneven), strict=True))


def _even_layers(c: Config) -> Derived:
    stages, total, schedule = num_stages(c), c.pipeline.parallel_layers, c.pipeline.schedule
    repeats, per_stage = c.pipeline.num_repeats, c.pipeline.num_layers_per_stage
    if fixed := fixed_repeats(schedule):
        if repeats not in (-1, fixed):
            yield (
                "pipeline.num_repeats",
                f"must be {fixed} with schedule {schedule}, got {repeats}; or use "
                "pipeline.schedule=circular, lockstep_1f1b or interleaved_1f1b",
            )
            return {}
        repeats = fixed
    if repeats == -1 and per_stage == -1:
        per_stage = 1
    if repeats == -1:
        repeats = max(1, total // (stages * per_stage))
    elif per_stage == -1:
        per_stage = max(1, total // (stages * repeats))
    if stages * repeats * per_stage != total:
        yield from _indivisible(c, repeats, per_stage)
    return _layout(repeats, per_stage, [])


def _uneven_layers(c: Config) -> Derived:
    chunks, stages, total = c.pipeline.layers_per_stage, num_stages(c), c.pipeline.parallel_layers
    total_key, total_text = _pipelined(c)
    if total < stages:
        yield total_key, f"{total} layers are too few for {stages} stages"
        return {}
    repeats = max(1, min(round(len(chunks) / stages), total // stages))
    fixed = fixed_repeats(c.pipeline.schedule)
    wrong = ""
    if min(chunks) < 1:
        wrong = "has a chunk without a layer"
    elif len(chunks) % stages or (fixed and len(chunks) != stages * fixed):
        wrong = f"has {len(chunks)} chunks, not {fixed or repeats} for each of {stages} stages"
    elif sum(chunks) != total:
        wrong = f"adds up to {sum(chunks)}, but {total_text}"
    if wrong:
        split = _even_split(total, (fixed or repeats) * stages)
        message = f"{wrong}; a split that fits: pipeline.layers_per_stage={split}"
        yield "pipeline.layers_per_stage", message
    return _layout(len(chunks) // stages, max(chunks), chunks)


def _automatic_layers(c: Config) -> Derived:
    """Derive the number of chunks; `plan.auto_stages` decides how many layers each gets."""
    total, stages, inside = c.model.stacked_layers, num_stages(c), c.pipeline.parallel_layers
    repeats = fixed_repeats(c.pipeline.schedule) or max(1, c.pipeline.num_repeats)
    if not ENGINES[c.pipeline.engine].auto_stages:
        able = " or ".join(name for name, engine in ENGINES.items() if engine.auto_stages)
        message = f"auto is for the {able} engine; leave it empty, or use a schedule that it runs"
        yield "pipeline.layers_per_stage", message
    elif inside < total:
        message = f"auto distributes all layers; use {_PARALLEL_LAYERS}=-1, or list the layers"
        yield "pipeline.layers_per_stage", message
    elif total < stages * repeats:
        message = f"{total} layers are too few for {stages} stages x {repeats} repeats"
        yield "model.num_layers", message
    return _layout(repeats, -1, AUTO)


def _even_split(total: int, parts: int) -> str:
    sizes = [total // parts + (i < total % parts) for i in range(parts)]
    return str(sizes).replace(" ", "")


def _indivisible(c: Config, repeats: int, per_stage: int) -> Wrong:
    """Yield the problem of layers that do not divide, with the nearest legal choices to paste."""
    stages, total = num_stages(c), c.pipeline.parallel_layers
    total_key, total_text = _pipelined(c)
    sizes = {"pipeline.num_repeats": repeats, "pipeline.num_layers_per_stage": per_stage}
    given = {key: size for key, size in sizes.items() if is_set(c, key)}
    unit = stages * math.prod(given.values())
    choices = _even_choices(c, repeats, per_stage)
    # config.json may fix model.num_layers, and with first dense layers it is another number.
    if total_key == _PARALLEL_LAYERS or not (c.model.from_hf or c.model.first_dense_layers):
        choices.append(f"{total_key}={multiples_around(total, unit)}")
    # If each stage has a program of its own, uneven stages cost nothing and balance better.
    engine = ENGINES[c.pipeline.engine]
    has_outside = engine.one_program and engine.takes(_PARALLEL_LAYERS)
    if has_outside and total_key != _PARALLEL_LAYERS and total > unit:
        choices.append(f"{_PARALLEL_LAYERS}={total // unit * unit}")
    chunks = stages * given.get("pipeline.num_repeats", 1)
    if total >= chunks:
        choices.append(f"pipeline.layers_per_stage={_even_split(total, chunks)}")
    written = " x ".join([f"{stages} stages", *(f"{key}={size}" for key, size in given.items())])
    legal = "; ".join(choices) or "fewer stages or repeats"
    key = next(iter(given), total_key)
    yield key, f"{total_text} does not divide into {written}; nearest legal: {legal}"


def _even_choices(c: Config, repeats: int, per_stage: int) -> list[str]:
    layers, remainder = divmod(c.pipeline.parallel_layers, num_stages(c))
    if remainder:
        return []
    fixed = fixed_repeats(c.pipeline.schedule)
    splits = [(v, layers // v) for v in ([fixed] if fixed else divisors(layers)) if layers % v == 0]
    splits.sort(key=lambda split: distance(split[0], repeats) + distance(split[1], per_stage))
    return [f"pipeline.num_repeats={v} pipeline.num_layers_per_stage={l}" for v, l in splits[:3]]


def data_shards(c: Config) -> int:
    """Return the number of batch shards over all slices."""
    return math.prod(c.mesh.size(axis) for axis in _ROW_AXES)


def _indivisible_batch(c: Config, size: int, **factors: int) -> str:
    factors |= {axis: c.mesh.size(axis) for axis in _ROW_AXES if c.mesh.size(axis) > 1}
    unit, sizes = math.prod(factors.values()), " x ".join(map(str, factors.values()))
    product = f"{' x '.join(factors)} = {sizes}" + (f" = {unit}" if len(factors) > 1 else "")
    return f"{size} is not divisible by {product}; nearest legal: {multiples_around(size, unit)}"


def least_microbatches(c: Config) -> int:
    """Return how many microbatches fill the pipeline; delayed forwarding doubles them."""
    return num_stages(c) * c.pipeline.forwarding_delay


@derive("pipeline.num_microbatches")
def derive_microbatches(c: Config) -> Derived:
    """Derive the number of microbatches, and check it against the engine's needs."""
    engine, count = ENGINES[c.pipeline.engine], c.pipeline.num_microbatches
    if not engine.has_stages:
        return {"pipeline.num_microbatches": max(1, count)}
    stages, least = num_stages(c), least_microbatches(c)
    if count == -1:
        return {"pipeline.num_microbatches": least}
    if engine.whole_rounds and (count % stages or count < least):
        delayed = " with delay_activation_forwarding" if least > stages else ""
        yield (
            "pipeline.num_microbatches",
            f"the {c.pipeline.engine} engine needs a multiple of the {stages} stages, at least "
            f"{least}{delayed}; got {count}, nearest legal: "
            f"{multiples_around(count, stages, least)}",
        )
    return {}


@check
def check_train_batch(c: Config) -> Wrong:
    batch, count, shards = c.data.global_batch_size, c.pipeline.num_microbatches, data_shards(c)
    if batch % (count * shards):
        message = _indivisible_batch(c, batch, num_microbatches=count)
        yield "data.global_batch_size", message + _propose_counts(c, batch)


@check
def check_batch_ramp(c: Config) -> Wrong:
    key, ramp, batch = "data.batch_ramp", c.data.batch_ramp, c.data.global_batch_size
    if not ramp:
        return
    is_ramp = all(len(pair) == 2 for pair in ramp) and ramp[0][0] == 0 < ramp[0][1]
    rises = (a < b and m < n and n % m == 0 for (a, m), (b, n) in pairwise(ramp))
    if not (is_ramp and ramp[-1][1] == batch and all(rises)):
        form = f"[[0, sequences], ..., [after step, {batch}]]"
        yield key, f"expected {form}, rising, each sequences a multiple of those before; got {ramp}"
        return
    for size in (size for _, size in ramp if not smaller_microbatches(c, size)):
        yield key, _indivisible_batch(c, size, num_microbatches=min(_counts(c, batch)))
    for other in ("compile.load", "mesh.elastic.axes"):
        if get(c, other):
            yield other, f"is for one batch size: leave it out, or {key}"


def smaller_microbatches(c: Config, size: int) -> int:
    """Return how many microbatches a smaller batch has, 0 if none fit: no more than the whole
    batch, and with no more rows. A pipeline has as many as possible, so that its bubble is small.
    """
    batch, count = c.data.global_batch_size, c.pipeline.num_microbatches
    fitting = [n for n in _counts(c, size) if n <= count and size * count <= n * batch]
    return (max if ENGINES[c.pipeline.engine].has_stages else min)(fitting, default=0)


@derive("eval.global_batch_size")
def derive_eval_batch(c: Config) -> Derived:
    """Devices must divide the batch of evaluations, which has no microbatches."""
    batch, size = c.data.global_batch_size, c.eval.global_batch_size
    if size == -1:
        return {"eval.global_batch_size": batch}
    if c.eval.every and size != batch and size % data_shards(c):
        yield "eval.global_batch_size", _indivisible_batch(c, size)
    return {}


@derive("eval.batches_per_source")
def derive_batches_per_source(c: Config) -> Derived:
    """Divide the batches of an evaluation among the sources of a mixture."""
    count, sources = c.eval.batches_per_source, len(c.data.mixture)
    is_told_apart = sources > 1 and not c.data.eval_path
    if count > 0 and not is_told_apart:
        reason = "data.eval_path is one set" if c.data.eval_path else "data.mixture has not several"
        yield "eval.batches_per_source", f"{count} batches of each source: {reason}; leave it out"
    if count == -1:
        is_divided = is_told_apart and c.eval.every
        count = -(-(c.eval.batches or MOST_BATCHES) // sources) if is_divided else 0
    return {"eval.batches_per_source": count}


def _counts(c: Config, batch: int) -> list[int]:
    """Return the numbers of microbatches that divide a batch, of those that the engine takes."""
    engine, (rows, rest) = ENGINES[c.pipeline.engine], divmod(batch, data_shards(c))
    unit, least = (num_stages(c), least_microbatches(c)) if engine.whole_rounds else (1, 1)
    if engine.has_stages and is_csv(c.pipeline.schedule):
        unit = least = c.pipeline.num_microbatches  # as many as its table has
    return [] if rest else [n for n in divisors(rows) if n >= least and n % unit == 0]


def _propose_counts(c: Config, batch: int) -> str:
    """Return the two numbers of microbatches nearest to the present one that divide the batch."""
    count = c.pipeline.num_microbatches
    nearest = sorted(sorted(_counts(c, batch), key=lambda n: distance(n, count))[:2])
    return f", or pipeline.num_microbatches={' or '.join(map(str, nearest))}" if nearest else ""


LAYOUT_RULES = rules_in(globals())
