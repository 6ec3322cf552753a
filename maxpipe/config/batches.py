"""Derives microbatches, and checks that batches divide over them and over the devices."""

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.layout import STAGES, num_stages
from maxpipe.config.proposals import distance, divisors, multiples_around
from maxpipe.config.sections import Config
from maxpipe.config.steps import Updates, step

DATA_SHARDS = ("mesh.ici.data", "mesh.dcn.data", "mesh.ici.fsdp", "mesh.dcn.fsdp")


def data_shards(c: Config) -> int:
    """Parts into which the rows of a batch are split: data x fsdp over all slices."""
    return _product(c, "data") * _product(c, "fsdp")


@step(
    "pipeline.engine",
    "pipeline.num_microbatches",
    "pipeline.delay_activation_forwarding",
    *STAGES,
    writes=("pipeline.num_microbatches",),
)
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
        near = multiples_around(count, stages, least)
        message = f"the circular engine needs a multiple of the {stages} stages, at least {least}{reason}"
        raise ConfigError(
            Problem("pipeline.num_microbatches", f"{message}; got {count}, nearest legal: {near}")
        )
    return {}


@step("data.global_batch_size", "pipeline.engine", "pipeline.num_microbatches", *STAGES, *DATA_SHARDS)
def train_batch(c: Config) -> None:
    batch, count, shards = c.data.global_batch_size, c.pipeline.num_microbatches, data_shards(c)
    if batch % (count * shards):
        sizes = multiples_around(batch, count * shards)
        factors = f"num_microbatches x data x fsdp = {count} x {_product(c, 'data')} x {_product(c, 'fsdp')}"
        message = f"{batch} is not divisible by {factors} = {count * shards}; nearest legal: {sizes}"
        raise ConfigError(Problem("data.global_batch_size", message + _other_counts(c, batch, shards)))


@step("eval.every", "eval.global_batch_size", "data.global_batch_size", *DATA_SHARDS)
def eval_batch(c: Config) -> None:
    batch, shards = c.eval.global_batch_size, data_shards(c)
    if c.eval.every and batch != c.data.global_batch_size and batch % shards:
        sizes = multiples_around(batch, shards)
        factors = f"data x fsdp = {_product(c, 'data')} x {_product(c, 'fsdp')} = {shards}"
        message = f"{batch} is not divisible by {factors}; nearest legal: {sizes}"
        raise ConfigError(Problem("eval.global_batch_size", message))


def _product(c: Config, axis: str) -> int:
    return getattr(c.mesh.ici, axis) * getattr(c.mesh.dcn, axis)


def _other_counts(c: Config, batch: int, shards: int) -> str:
    """The numbers of microbatches nearest to the one in use that fit the batch as it is."""
    if batch % shards:
        return ""
    count = c.pipeline.num_microbatches
    unit = num_stages(c) if c.pipeline.engine == "circular" else 1
    least = 2 * unit if c.pipeline.delay_activation_forwarding else unit
    fitting = [n for n in divisors(batch // shards) if n >= least and n % unit == 0]
    nearest = sorted(sorted(fitting, key=lambda n: distance(n, count))[:2])
    return f", or pipeline.num_microbatches={' or '.join(map(str, nearest))}" if nearest else ""


STEPS = (microbatches, train_batch, eval_batch)
