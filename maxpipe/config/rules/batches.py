"""Derive the number of microbatches; check that batches divide over microbatches and devices, and
that epochs of them can be counted.
"""

import math

from maxpipe.config.catalog import ENGINES, SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.rules.rule import Updates, distance, divisors, multiples_around, rule
from maxpipe.config.rules.stages import STAGE_AXES, num_stages
from maxpipe.config.sections import Config

_ROW_AXES = ("data", "fsdp", "expert")
MOST_BATCHES = 2**31 - 1  # of each source, where an evaluation has all
SHARD_AXES = tuple(f"mesh.{level}.{axis}" for axis in _ROW_AXES for level in ("ici", "dcn"))


def data_shards(c: Config) -> int:
    """Return into how many parts the rows of a batch are split, over all slices."""
    return math.prod(c.mesh.size(axis) for axis in _ROW_AXES)


def _shard_factors(c: Config) -> tuple[str, str]:
    """Return names and sizes of the axes of `data_shards`, expert only if there are several."""
    axes = [axis for axis in _ROW_AXES if axis != "expert" or c.mesh.size(axis) > 1]
    return " x ".join(axes), " x ".join(str(c.mesh.size(axis)) for axis in axes)


def least_microbatches(c: Config) -> int:
    """Return how many microbatches fill the pipeline; delayed forwarding doubles them."""
    return num_stages(c) * c.pipeline.forwarding_delay


@rule(
    "pipeline.engine",
    "pipeline.num_microbatches",
    "pipeline.delay_activation_forwarding",
    *STAGE_AXES,
    writes=("pipeline.num_microbatches",),
)
def derive_microbatches(c: Config) -> Updates:
    """Derive the number of microbatches, and check it against the engine's needs."""
    engine, count = ENGINES[c.pipeline.engine], c.pipeline.num_microbatches
    if not engine.has_stages:
        return {"pipeline.num_microbatches": max(1, count)}
    stages, least = num_stages(c), least_microbatches(c)
    if count == -1:
        return {"pipeline.num_microbatches": least}
    if engine.whole_rounds and (count % stages or count < least):
        delayed = " with delay_activation_forwarding" if least > stages else ""
        message = (
            f"the {c.pipeline.engine} engine needs a multiple of the {stages} stages, "
            f"at least {least}{delayed}; got {count}, "
            f"nearest legal: {multiples_around(count, stages, least)}"
        )
        raise ConfigError(Problem("pipeline.num_microbatches", message))
    return {}


@rule(
    "data.global_batch_size",
    "pipeline.engine",
    "pipeline.num_microbatches",
    *STAGE_AXES,
    *SHARD_AXES,
)
def check_train_batch(c: Config) -> None:
    """Check that microbatches and devices divide the training batch."""
    batch, count, shards = c.data.global_batch_size, c.pipeline.num_microbatches, data_shards(c)
    if batch % (count * shards):
        axes, sizes = _shard_factors(c)
        factors = f"{count} x {sizes} = {count * shards}"
        message = (
            f"{batch} is not divisible by num_microbatches x {axes} = {factors}; "
            f"nearest legal: {multiples_around(batch, count * shards)}"
            f"{_propose_counts(c, batch, shards)}"
        )
        raise ConfigError(Problem("data.global_batch_size", message))


@rule("eval.global_batch_size", "data.global_batch_size", writes=("eval.global_batch_size",))
def derive_eval_batch(c: Config) -> Updates:
    """Derive the batch size of evaluations from the training batch."""
    size = c.eval.global_batch_size
    return {"eval.global_batch_size": c.data.global_batch_size if size == -1 else size}


@rule("eval.every", "eval.global_batch_size", "data.global_batch_size", *SHARD_AXES)
def check_eval_batch(c: Config) -> None:
    """Check that the devices divide the batch of evaluations, which has no microbatches."""
    batch, shards = c.eval.global_batch_size, data_shards(c)
    if c.eval.every and batch != c.data.global_batch_size and batch % shards:
        axes, sizes = _shard_factors(c)
        message = (
            f"{batch} is not divisible by {axes} = {sizes} = {shards}; "
            f"nearest legal: {multiples_around(batch, shards)}"
        )
        raise ConfigError(Problem("eval.global_batch_size", message))


@rule(
    "eval.batches_per_source",
    "eval.batches",
    "eval.every",
    "data.mixture",
    "data.eval_path",
    writes=("eval.batches_per_source",),
)
def derive_batches_per_source(c: Config) -> Updates:
    """Divide the batches of an evaluation among the sources of a mixture."""
    count, sources = c.eval.batches_per_source, len(c.data.mixture)
    is_told_apart = sources > 1 and not c.data.eval_path
    if count > 0 and not is_told_apart:
        reason = (
            "data.eval_path is one set"
            if c.data.eval_path
            else "data.mixture has not several sources"
        )
        message = f"{count} batches of each source: {reason}; leave the key out"
        raise ConfigError(Problem("eval.batches_per_source", message))
    if count == -1:
        is_divided = is_told_apart and c.eval.every
        count = -(-(c.eval.batches or MOST_BATCHES) // sources) if is_divided else 0
    return {"eval.batches_per_source": count}


def _propose_counts(c: Config, batch: int, shards: int) -> str:
    """Return the two numbers of microbatches nearest to the present one that divide the batch."""
    if batch % shards:
        return ""
    engine, count = ENGINES[c.pipeline.engine], c.pipeline.num_microbatches
    unit = num_stages(c) if engine.whole_rounds else 1
    least = least_microbatches(c) if engine.whole_rounds else 1
    fitting = [n for n in divisors(batch // shards) if n >= least and n % unit == 0]
    nearest = sorted(sorted(fitting, key=lambda n: distance(n, count))[:2])
    return f", or pipeline.num_microbatches={' or '.join(map(str, nearest))}" if nearest else ""


@rule("epochs", "data.source", "data.mixture")
def check_epochs(c: Config) -> None:
    """Refuse epochs of documents that have none."""
    if c.epochs and c.data.mixture:
        message = "the sources of data.mixture pass at speeds of their own: give steps instead"
        raise ConfigError(Problem("epochs", message))
    if c.epochs and not SOURCES[c.data.source].needs_tokenizer:
        message = f"data.source={c.data.source} draws documents without end: give steps instead"
        raise ConfigError(Problem("epochs", message))


BATCH_RULES = (
    derive_microbatches,
    check_train_batch,
    derive_eval_batch,
    check_eval_batch,
    derive_batches_per_source,
    check_epochs,
)
