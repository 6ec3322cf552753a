"""Derives values that stand for others (-1) and depend on no device."""

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.config.steps import Updates, step


@step("model.embed_dim", "model.num_query_heads", "model.head_dim", writes=("model.head_dim",))
def head_dim(c: Config) -> Updates:
    width, heads, head = c.model.embed_dim, c.model.num_query_heads, c.model.head_dim
    if head == -1 and width % heads:
        legal = " or ".join(str(n) for n in (width // heads * heads, (width // heads + 1) * heads) if n)
        message = f"{width} is not divisible by model.num_query_heads={heads}; nearest legal: {legal}"
        raise ConfigError(Problem("model.embed_dim", message))
    size = width // heads if head == -1 else head
    if size % 2:
        message = f"must be even, since rotary embeddings turn pairs; got {size}"
        raise ConfigError(Problem("model.head_dim", message))
    return {"model.head_dim": size}


@step(
    "optimizer.decay_steps", "optimizer.warmup_steps", "steps",
    writes=("optimizer.decay_steps", "optimizer.warmup_steps"),
)  # fmt: skip
def learning_rate_steps(c: Config) -> Updates:
    decay = c.steps if c.optimizer.decay_steps == -1 else c.optimizer.decay_steps
    warmup = decay // 20 if c.optimizer.warmup_steps == -1 else c.optimizer.warmup_steps
    if warmup > decay:
        message = (
            f"{warmup} is more than optimizer.decay_steps={decay}; give at most that, or -1 for a twentieth"
        )
        raise ConfigError(Problem("optimizer.warmup_steps", message))
    return {"optimizer.decay_steps": decay, "optimizer.warmup_steps": warmup}


@step("eval.global_batch_size", "data.global_batch_size", writes=("eval.global_batch_size",))
def eval_batch_size(c: Config) -> Updates:
    size = c.eval.global_batch_size
    return {"eval.global_batch_size": c.data.global_batch_size if size == -1 else size}


DERIVE = (head_dim, learning_rate_steps, eval_batch_size)
