"""Read the tensors and products of a layer on one device, and the sizes of values."""

from functools import cache

import numpy as np
from jax.sharding import PartitionSpec

from maxpipe.config.catalog import OPTIMIZERS
from maxpipe.config.options import update
from maxpipe.config.rules.layout import data_shards
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.config.terminal import ignore_note
from maxpipe.model.kernels.choose import choose_gating, choose_kernel, choose_rotation
from maxpipe.model.parameters import ParamSpec
from maxpipe.pipeline.weights import spec_in_use
from maxpipe.plan.device_parameters import (
    Rules,
    Sizes,
    bound_rules,
    mesh_sizes,
    num_shards,
    rules_of,
)
from maxpipe.plan.layer_tensors import Layer, read_layer
from maxpipe.plan.layer_trace import trace_model
from maxpipe.plan.number import FLOAT32
from maxpipe.sharding.collectives import EXPERT_AXIS


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def optimizer_bytes(config: Config) -> float:
    """Return the bytes of optimizer state per parameter."""
    return FLOAT32 * OPTIMIZERS[config.optimizer.name].moments


def update_bytes(config: Config) -> float:
    """Return the bytes that the optimizer's update moves per parameter, matrix products apart."""
    state = itemsize(config.model.param_dtype) + optimizer_bytes(config)
    return 2 * state + FLOAT32  # read and written, and the gradient read


def microbatch_tokens(config: Config) -> float:
    rows = config.data.global_batch_size / (config.pipeline.num_microbatches * data_shards(config))
    return rows * config.data.sequence_length / config.mesh.size("context")


def on_platform(config: Config, platform: str) -> Config:
    """Return the configuration with the kernels of a layer that `auto` chooses on a platform.

    Until they are chosen, attention counts as a kernel that never holds all scores.
    """
    choices = {"attention": choose_kernel, "rotation": choose_rotation, "gating": choose_gating}
    return update(
        config,
        {f"model.{key}": choose(config, platform, ignore_note) for key, choose in choices.items()},
    )


def layer_of(config: Config) -> Layer:
    """Return the tensors and products of a layer of a resolved configuration."""
    return _layer(config.model, config.data.sequence_length, rules_of(config), mesh_sizes(config))


@cache
def _layer(model: ModelConfig, sequence_length: int, rules: Rules, sizes: Sizes) -> Layer:
    axis_rules = bound_rules(rules, sizes)

    def dimension_shards(spec: ParamSpec) -> list[int]:
        computing = spec_in_use(axis_rules, spec)
        entries = [*computing, *[None] * (len(spec.shape) - len(computing))]
        return [num_shards(PartitionSpec(entry), sizes) for entry in entries]

    trace = trace_model(model, sequence_length, dict(sizes)[EXPERT_AXIS])
    return read_layer(trace, dimension_shards)
