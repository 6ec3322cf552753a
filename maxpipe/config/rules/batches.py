"""Derive microbatches and batch sizes; check that batches divide over microbatches and devices."""

import math

from maxpipe.config.catalog import ENGINES, SOURCES
from maxpipe.config.rules.rule import (
    Derived,
    Wrong,
    check,
    derive,
    distance,
    divisors,
    multiples_around,
    rules_in,
)
from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config

_ROW_AXES = ("data", "fsdp", "expert")
MOST_BATCHES = 2**31 - 1  # of each source, where an evaluation has all
SHARD_AXES = tuple(f"mesh.{level}.{axis}" for axis in _ROW_AXES for level in ("ici", "dcn"))


def data_shards(c: Config) -> int:
    """Return the number of batch shards over all slices."""
    return math.prod(c.mesh.size(axis) for axis in _ROW_AXES)


def _shard_factors(c: Config) -> tuple[str, str]:
    """Return names and sizes of the axes of `data_shards`, expert only if there are several."""
    axes = [axis for axis in _ROW_AXES if axis != "expert" or c.mesh.size(axis) > 1]
    return " x ".join(axes), " x ".join(str(c.mesh.size(axis)) for axis in axes)


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
    """Check that microbatches and devices divide the training batch."""
    batch, count, shards = c.data.global_batch_size, c.pipeline.num_microbatches, data_shards(c)
    if batch % (count * shards):
        axes, sizes = _shard_factors(c)
        yield (
            "data.global_batch_size",
            f"{batch} is not divisible by num_microbatches x {axes} = {count} x {sizes} = "
            f"{count * shards}; nearest legal: {multiples_around(batch, count * shards)}"
            f"{_propose_counts(c, batch, shards)}",
        )


@derive("eval.global_batch_size")
def derive_eval_batch(c: Config) -> Derived:
    """Derive the batch of evaluations, which has no microbatches; check that devices divide it."""
    batch, size = c.data.global_batch_size, c.eval.global_batch_size
    if size == -1:
        return {"eval.global_batch_size": batch}
    if c.eval.every and size != batch and size % (shards := data_shards(c)):
        axes, sizes = _shard_factors(c)
        yield (
            "eval.global_batch_size",
            f"{size} is not divisible by {axes} = {sizes} = {shards}; nearest legal: "
            f"{multiples_around(size, shards)}",
        )
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


def _propose_counts(c: Config, batch: int, shards: int) -> str:
    """Return the two numbers of microbatches nearest to the present one that divide the batch."""
    if batch % shards:
        return ""
    engine, count = ENGINES[c.pipeline.engine], c.pipeline.num_microbatches
    unit, least = (num_stages(c), least_microbatches(c)) if engine.whole_rounds else (1, 1)
    fitting = [n for n in divisors(batch // shards) if n >= least and n % unit == 0]
    nearest = sorted(sorted(fitting, key=lambda n: distance(n, count))[:2])
    return f", or pipeline.num_microbatches={' or '.join(map(str, nearest))}" if nearest else ""


@check
def check_epochs(c: Config) -> Wrong:
    """Refuse epochs of documents that have none."""
    if c.epochs and c.data.mixture:
        yield "epochs", "the sources of data.mixture pass at different speeds: give steps instead"
    elif c.epochs and not SOURCES[c.data.source].needs_tokenizer:
        message = f"data.source={c.data.source} draws documents without end: give steps instead"
        yield "epochs", message


BATCH_RULES = rules_in(globals())
