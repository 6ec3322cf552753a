"""Read what a layer, a value and a mesh are for the closed forms."""

from collections.abc import Callable
from functools import cache

import numpy as np
from jax.sharding import PartitionSpec

from maxpipe.config.catalog import OPTIMIZERS
from maxpipe.config.engine_facts import Engine
from maxpipe.config.options import update
from maxpipe.config.rules.layout import data_shards
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.config.terminal import ignore_note
from maxpipe.model.kernels.choose import choose_gating, choose_kernel, choose_rotation
from maxpipe.model.parameters import ParamSpec
from maxpipe.pipeline.manual import BATCH_AXES, ROW_AXES
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

PREFETCH = "pipeline.fsdp_prefetch"


def itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def optimizer_bytes(config: Config) -> float:
    """Return the bytes of optimizer state per parameter."""
    return itemsize(config.optimizer.moment_dtype) * OPTIMIZERS[config.optimizer.name].moments


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


def changes_step(
    engine: Engine, size: Callable[[str], int], repeats: int = 1, *, casts: bool
) -> bool:
    """Return whether the modes of `pipeline.fsdp_gather` differ for an engine on a mesh.

    `size` maps an axis to its size; `casts` is whether parameters are used in a narrower dtype than
    they are stored in.
    """
    is_split = engine.has_stages and size("fsdp") > 1
    if engine.is_differentiated:
        # Such a loop sums gradients in each iteration over devices with the same weights but
        # different tokens. Over context XLA sums once where a stage has several repeats, whose
        # gradients are parts of one array.
        axes = BATCH_AXES if repeats == 1 else ROW_AXES
        return is_split or any(size(axis) > 1 for axis in axes if axis != "fsdp")
    if engine.lockstep:  # each stage has a part of the head
        return is_split or size("stage") > 1
    # Units that are programs of their own cast weights for themselves.
    return is_split or (not engine.one_program and casts)
