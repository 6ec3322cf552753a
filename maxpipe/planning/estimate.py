"""Memory of one device from shapes alone: arithmetic that explains a compiler's figure and prices alternatives.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from dataclasses import dataclass

from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config
from maxpipe.pipeline.engines.scheduled.plan import lockstep_plan
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.planning.flops import parameter_count
from maxpipe.planning.footprint import (
    axis_size,
    itemsize,
    kept_width,
    logits_bytes,
    microbatch_tokens,
    optimizer_bytes,
    stash_width,
    working_width,
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `activations` holds everything that grows with tokens."""

    parameters: float
    optimizer: float
    gradients: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.optimizer + self.gradients + self.activations


def estimate(config: Config) -> Memory:
    """Memory of one device for a resolved configuration."""
    fsdp, tensor, stages = (axis_size(config, axis) for axis in ("fsdp", "tensor", "stage"))
    count = parameter_count(config.model)
    shards = fsdp * tensor * stages
    whole = (
        fsdp
        if config.pipeline.fsdp_gather != "per_iteration" and config.pipeline.engine != "sequential"
        else 1
    )
    gathered = itemsize(config.model.dtype) * count / shards * whole if whole > 1 else 0.0
    return Memory(
        parameters=itemsize(config.model.param_dtype) * count / shards + gathered,
        optimizer=optimizer_bytes(config) * count / shards,
        gradients=4.0 * count / shards * whole,
        activations=_activations(config),
    )


def _activations(config: Config) -> float:
    model, pipeline = config.model, config.pipeline
    layers, per_layer = build_layout(config).layers_per_stage, kept_width(config)
    chunk_input, unit = float(model.embed_dim), model.embed_dim + layers * per_layer
    if pipeline.engine == "sequential":
        stored = layers * (model.embed_dim + per_layer)
    elif pipeline.engine == "scheduled":
        plan = lockstep_plan(build_table(config))
        slots = plan.sizes.activations + plan.sizes.gradients + 2
        stored = (plan.sizes.residuals + 1) * unit + slots * chunk_input
        if plan.splits_backward:
            stored += (plan.sizes.stash + 1) * layers * stash_width(config)
    else:
        delay = 2 if pipeline.delay_activation_forwarding else 1
        stages, microbatches = num_stages(config), pipeline.num_microbatches
        iterations = microbatches * pipeline.num_repeats + delay * (stages - 1)
        # The conveyor of inputs and outputs, and its gradient.
        stored = iterations * unit + 2 * microbatches / stages * chunk_input
    tokens = microbatch_tokens(config)
    # The scheduled engine deals the tokens out to all stages.
    share = num_stages(config) if pipeline.engine == "scheduled" else 1
    # One layer at a time is computed again.
    columns = stored + working_width(config)
    return tokens * itemsize(model.dtype) * columns + logits_bytes(config, tokens / share)
