"""Memory of one device from shapes alone: arithmetic that explains a compiler's figure and prices alternatives.

Letters: S stages, V repeats, M microbatches, D embed.
"""

import math
from dataclasses import dataclass

import numpy as np

from maxpipe.builder import build_layout, build_table
from maxpipe.config.batches import data_shards
from maxpipe.config.layout import num_stages
from maxpipe.config.sections import Config
from maxpipe.pipeline.remat import MATMULS, REMAT
from maxpipe.pipeline.schedules._plan import lockstep_plan
from maxpipe.telemetry.flops import parameter_count

# Moments per parameter, float32, by optimizer; others are counted like adamw.
_MOMENTS = {"sgd": 1}
_NORMS_AND_ADDITIONS = 6  # arrays of width D that a layer makes beside its matrix products


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


def axis_size(config: Config, axis: str) -> int:
    """Size of a mesh axis over all slices."""
    return getattr(config.mesh.ici, axis) * getattr(config.mesh.dcn, axis)


def estimate(config: Config) -> Memory:
    """Memory of one device for a resolved configuration."""
    fsdp, tensor, stages = (axis_size(config, axis) for axis in ("fsdp", "tensor", "stage"))
    count = parameter_count(config.model)
    shards = fsdp * tensor * stages
    whole = fsdp if config.pipeline.fsdp_gather != "per_iteration" and config.pipeline.engine != "sequential" else 1
    gathered = _bytes(config.model.dtype) * count / shards * whole if whole > 1 else 0.0
    return Memory(
        parameters=_bytes(config.model.param_dtype) * count / shards + gathered,
        optimizer=4.0 * _MOMENTS.get(config.optimizer.name, 2) * count / shards,
        gradients=4.0 * count / shards * whole,
        activations=_activations(config),
    )


def microbatch_tokens(config: Config) -> float:
    """Tokens of a microbatch on one device."""
    rows = config.data.global_batch_size / (config.pipeline.num_microbatches * data_shards(config))
    return rows * config.data.sequence_length / axis_size(config, "context")


def layer_widths(config: Config) -> dict[str, float]:
    """Width on one device of each tensor of a layer that a rematerialisation policy can name."""
    model, tensor = config.model, axis_size(config, "tensor")
    query, key = model.num_query_heads * model.head_dim / tensor, model.num_kv_heads * model.head_dim / tensor
    widths = {"query_proj": query, "key_proj": key, "value_proj": key, "context": query, "out_proj": model.embed_dim}
    return widths | {"mlp_gate": model.mlp_dim / tensor, "mlp_up": model.mlp_dim / tensor, "mlp_down": model.embed_dim}


def _activations(config: Config) -> float:
    model, pipeline = config.model, config.pipeline
    widths, layers = layer_widths(config), build_layout(config).layers_per_stage
    kept = REMAT.get(pipeline.remat_policy)(pipeline)
    names = MATMULS if kept.everything else kept.device
    per_layer = sum(widths.get(name, 0.0) for name in names)
    if kept.everything:
        per_layer += _NORMS_AND_ADDITIONS * model.embed_dim
    chunk_input, unit = float(model.embed_dim), model.embed_dim + layers * per_layer
    if pipeline.engine == "sequential":
        stored = layers * (model.embed_dim + per_layer)
    elif pipeline.engine == "scheduled":
        plan = lockstep_plan(build_table(config))
        slots = plan.num_activation_slots + plan.num_gradient_slots + 2
        stored = (plan.num_residual_slots + 1) * unit + slots * chunk_input
    else:
        delay = 2 if pipeline.delay_activation_forwarding else 1
        stages, microbatches = num_stages(config), pipeline.num_microbatches
        iterations = microbatches * pipeline.num_repeats + delay * (stages - 1)
        # The conveyor of inputs and outputs, and its gradient.
        stored = iterations * unit + 2 * microbatches / stages * chunk_input
    # One layer at a time is computed again; its tensors and their gradients are there together.
    working = 2 * (sum(widths.values()) + _NORMS_AND_ADDITIONS * model.embed_dim)
    tokens = microbatch_tokens(config)
    return tokens * _bytes(model.dtype) * (stored + working) + _logits(config, tokens)


def _logits(config: Config, tokens: float) -> float:
    """Logits and their gradient, float32, of the tokens that a device takes through the head at a time."""
    share = num_stages(config) if config.pipeline.engine == "scheduled" else 1
    tile = math.ceil(tokens / share / config.model.logit_tiles)
    return 2 * 4.0 * tile * config.model.vocab_size / axis_size(config, "tensor")


def _bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
