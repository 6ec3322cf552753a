"""Derives microbatches, and checks that batches divide over them and over the devices.

Derives values that stand for others (-1) and depend on no device."""

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.nearest import distance, divisors, multiples_around
from maxpipe.config.rules.rule import Updates, rule
from maxpipe.config.rules.stages import STAGES, num_stages
from maxpipe.config.sections import Config

DATA_SHARDS = ("mesh.ici.data", "mesh.dcn.data", "mesh.ici.fsdp", "mesh.dcn.fsdp")


def data_shards(c: Config) -> int:
    """EngineInputs into which the rows of a batch are split: data x fsdp over all slices."""
    return c.mesh.size("data") * c.mesh.size("fsdp")


@rule(
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
        message = (
            f"the circular engine needs a multiple of the {stages} stages, at least {least}{reason}"
        )
        raise ConfigError(
            Problem("pipeline.num_microbatches", f"{message}; got {count}, nearest legal: {near}")
        )
    return {}


@rule(
    "data.global_batch_size", "pipeline.engine", "pipeline.num_microbatches", *STAGES, *DATA_SHARDS
)
def train_batch(c: Config) -> None:
    batch, count, shards = c.data.global_batch_size, c.pipeline.num_microbatches, data_shards(c)
    if batch % (count * shards):
        sizes = multiples_around(batch, count * shards)
        factors = f"num_microbatches x data x fsdp = {count} x {c.mesh.size('data')} x {c.mesh.size('fsdp')}"
        message = (
            f"{batch} is not divisible by {factors} = {count * shards}; nearest legal: {sizes}"
        )
        raise ConfigError(
            Problem("data.global_batch_size", message + _other_counts(c, batch, shards))
        )


@rule("eval.every", "eval.global_batch_size", "data.global_batch_size", *DATA_SHARDS)
def eval_batch(c: Config) -> None:
    batch, shards = c.eval.global_batch_size, data_shards(c)
    if c.eval.every and batch != c.data.global_batch_size and batch % shards:
        sizes = multiples_around(batch, shards)
        factors = f"data x fsdp = {c.mesh.size('data')} x {c.mesh.size('fsdp')} = {shards}"
        message = f"{batch} is not divisible by {factors}; nearest legal: {sizes}"
        raise ConfigError(Problem("eval.global_batch_size", message))


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


RULES = (microbatches, train_batch, eval_batch)


@rule("model.embed_dim", "model.num_query_heads", "model.head_dim", writes=("model.head_dim",))
def head_dim(c: Config) -> Updates:
    width, heads, head = c.model.embed_dim, c.model.num_query_heads, c.model.head_dim
    if head == -1 and width % heads:
        legal = " or ".join(
            str(n) for n in (width // heads * heads, (width // heads + 1) * heads) if n
        )
        message = (
            f"{width} is not divisible by model.num_query_heads={heads}; nearest legal: {legal}"
        )
        raise ConfigError(Problem("model.embed_dim", message))
    size = width // heads if head == -1 else head
    if size % 2:
        message = f"must be even, since rotary embeddings turn pairs; got {size}"
        raise ConfigError(Problem("model.head_dim", message))
    return {"model.head_dim": size}


@rule(
    "optimizer.decay_steps",
    "optimizer.warmup_steps",
    "steps",
    writes=("optimizer.decay_steps", "optimizer.warmup_steps"),
)
def learning_rate_steps(c: Config) -> Updates:
    decay = c.steps if c.optimizer.decay_steps == -1 else c.optimizer.decay_steps
    warmup = decay // 20 if c.optimizer.warmup_steps == -1 else c.optimizer.warmup_steps
    if warmup > decay:
        message = f"{warmup} is more than optimizer.decay_steps={decay}; give at most that, or -1 for a twentieth"
        raise ConfigError(Problem("optimizer.warmup_steps", message))
    return {"optimizer.decay_steps": decay, "optimizer.warmup_steps": warmup}


@rule("eval.global_batch_size", "data.global_batch_size", writes=("eval.global_batch_size",))
def eval_batch_size(c: Config) -> Updates:
    size = c.eval.global_batch_size
    return {"eval.global_batch_size": c.data.global_batch_size if size == -1 else size}


DERIVE = (head_dim, learning_rate_steps, eval_batch_size)
