"""Compute sizes on one device: parameters, and the tensors of a layer that its backward uses.

Widths are values of `model.dtype` per token of a microbatch.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from maxpipe.config.catalog import ENGINES, OPTIMIZERS, REMAT_POLICIES, RematPolicy
from maxpipe.config.options import update
from maxpipe.config.rules.layout import data_shards
from maxpipe.config.sections import MESH_AXES, Config, ModelConfig, PipelineConfig
from maxpipe.config.terminal import ignore_note
from maxpipe.model.kernels.choose import (
    EVERYWHERE,
    choose_gating,
    choose_kernel,
    choose_rotation,
)
from maxpipe.model.parameters import ParamSpec, outer_axes
from maxpipe.pipeline.chunk import offloaded_names, remat_policy
from maxpipe.pipeline.weights import STORAGE_AXES, axes_in_use, spec_in_use
from maxpipe.plan.layer_tensors import Layer, read_layer
from maxpipe.plan.layer_trace import model_program, trace_model
from maxpipe.plan.number import FLOAT32
from maxpipe.plan.weights_held import WeightsOfParts
from maxpipe.sharding.collectives import EXPERT_AXIS
from maxpipe.sharding.rules import AxisRules, without

Rules = tuple[tuple[str, tuple[str, ...]], ...]
Sizes = tuple[tuple[str, int], ...]


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


def device_parameters(
    config: Config,
    part: str,
    *,
    whole_over: Collection[str] = (),
    without_stages: bool = False,
    only_trained: bool = False,
) -> float:
    """Return the parameters of a part of the model that a device holds.

    Args:
      part: "embed", "head", "layers" for one layer, which lies on one stage, or "outside" for a
        layer outside the pipeline, laid out for use.
      whole_over: mesh axes over which the parameters are gathered.
      without_stages: whether the part lies on the devices of one stage, as on the MPMD engine.
      only_trained: whether to leave out frozen parameters.
    """
    sizes = {axis: config.mesh.size(axis) for axis in MESH_AXES}
    if without_stages or part == "layers":
        sizes["stage"] = 1
    mesh = tuple(sizes.items())
    gathered = tuple(sorted(whole_over))
    return _device_parameters(config.model, part, _rules(config), mesh, gathered, only_trained)


def total_parameters(
    config: Config, whole_over: Collection[str] = (), *, only_trained: bool = False
) -> float:
    """Return the parameters of all parts on one device; arguments as in `device_parameters`."""
    layers = config.model.stacked_layers / config.mesh.size("stage")
    of_layer, *ends = (
        device_parameters(config, part, whole_over=whole_over, only_trained=only_trained)
        for part in ("layers", "embed", "head")
    )
    return layers * of_layer + sum(ends)


def with_dense_layers(config: Config) -> Config:
    """Return the configuration of a model whose layers are all like the first dense ones."""
    return replace(config, model=config.model.dense)


def on_platform(config: Config, platform: str) -> Config:
    """Return the configuration with the kernels of a layer that `auto` chooses on a platform.

    Until they are chosen, attention counts as a kernel that never holds all scores.

    Args:
      platform: the devices' platform, as JAX names it.

    Raises:
      ConfigError: see `choose_kernel`.
    """
    return update(
        config,
        {
            "model.attention": choose_kernel(config, platform, ignore_note),
            "model.rotation": choose_rotation(config, platform, ignore_note),
            "model.gating": choose_gating(config, platform, ignore_note),
        },
    )


def holds_scores(config: Config) -> bool:
    """Return whether the configured attention kernel holds all scores of a layer."""
    return config.model.attention == EVERYWHERE


def scores_width(config: Config, score_bytes: float = FLOAT32) -> float:
    """Return the width of a layer's scores of `score_bytes` each; 0 if its kernel holds none.

    By default these are the probabilities in float32, which is all that attention's backward needs
    besides operands and result.
    """
    return scores_of_token(config) * score_bytes / itemsize(config.model.dtype)


def scores_of_token(config: Config) -> float:
    """Return how many scores a device holds for each of its tokens; 0 if its kernel holds none."""
    if not holds_scores(config):
        return 0.0
    return config.model.num_query_heads / config.mesh.size("tensor") * config.data.sequence_length


def made_width(config: Config) -> float:
    """Return the width of the results of a forward's products in a layer, any scores included.

    A kernel that holds scores has them in float32 and in the dtype of activations.
    """
    scores = scores_width(config, FLOAT32 + itemsize(config.model.dtype))
    return layer_of(config).result_width + scores


def layer_of(config: Config) -> Layer:
    """Return the tensors and products of a layer of a resolved configuration."""
    return _layer(config.model, config.data.sequence_length, _rules(config), _sizes(config))


def residual_width(config: Config) -> float:
    """Return the width of a layer's residuals, without the input of its chunk."""
    layer, pipeline = layer_of(config), config.pipeline
    policy, has_stages = remat_policy(pipeline), ENGINES[pipeline.engine].has_stages
    by_layer = not pipeline.remat_iterations and has_stages
    if policy.everything or (by_layer and not pipeline.remat_layers):
        return everything_width(config, layer)
    layer_input = config.model.embed_dim if by_layer else 0
    return layer_input + _named_width(config, layer, by_itself=by_layer or not has_stages)


def _named_width(config: Config, layer: Layer, *, by_itself: bool) -> float:
    """Return the width of the named tensors that a layer saves on the device.

    Args:
      layer: a layer of the model's stack, or a first dense one.
      by_itself: whether the layer applies the policy to itself, and saves what its own backward
        reads. The last product's result is left out where only the next layer's input depends on
        it.
    """
    names = RematPolicy(device=remat_policy(config.pipeline).device)
    if not by_itself:
        return layer.saved_width(names.device)
    return layer.residual_bytes(names) / itemsize(config.model.dtype)


def is_unrolled(pipeline: PipelineConfig) -> bool:
    """Return whether each layer of an engine without stages is compiled by itself."""
    return not (ENGINES[pipeline.engine].has_stages or pipeline.scan_layers)


def everything_width(config: Config, layer: Layer) -> float:
    """Return the width of the residuals of a layer that saves all that its backward needs.

    Where each layer is compiled by itself, XLA keeps the results of products and gathers, and
    computes the rest again within the operations that read it.
    """
    scores = scores_width(config)
    if not is_unrolled(config.pipeline):
        saved = layer.residual_bytes(REMAT_POLICIES["none"]) / itemsize(config.model.dtype)
        return saved + scores
    return layer.result_width + layer.gathered_width + scores


def first_layers_width(config: Config) -> float:
    """Return the width of what the first dense layers keep of a microbatch, with their inputs.

    Each of them applies the policy to itself, whatever the pipeline's layers do. On engines with
    stages they count as layers outside the pipeline, with all that the policy names.
    """
    first = config.model.first_dense_layers
    if not first:
        return 0.0
    layer = layer_of(with_dense_layers(config))
    by_itself = not ENGINES[config.pipeline.engine].has_stages
    if remat_policy(config.pipeline).everything:
        saved = everything_width(config, layer)
    else:
        saved = _named_width(config, layer, by_itself=by_itself)
    return first * (config.model.embed_dim + saved)


def offloaded_width(config: Config) -> float:
    """Return the width of a layer's residuals that wait for the backward in the host's memory."""
    return layer_of(config).saved_width(offloaded_names(config.pipeline))


def held_width(config: Config) -> float:
    """Return the width of what a chunk's backward holds of each layer except its current one.

    These are saved tensors, and what it recomputes for all layers at once: nothing where it
    recomputes layer by layer.
    """
    pipeline, saved = config.pipeline, residual_width(config)
    if not pipeline.remat_iterations or not ENGINES[pipeline.engine].has_stages:
        return saved
    if pipeline.remat_layers:
        return saved + config.model.embed_dim
    return max(made_width(config), saved)


def cheap_width(config: Config) -> float:
    """Return the width of cheap values that a backward may hold of each layer, computed only once.

    XLA holds fewer: it recomputes some within the operations that read them.
    """
    saved = layer_of(config).residual_bytes(None) / itemsize(config.model.dtype)
    return max(0.0, saved + scores_width(config) - held_width(config))


def weights_of_parts(config: Config, *, only_trained: bool = False) -> WeightsOfParts:
    """Return the parameters of parts of a model on one device, of a resolved configuration.

    Args:
      only_trained: whether to leave out frozen parameters.
    """
    part = partial(device_parameters, only_trained=only_trained)

    def ends(whole_over: Collection[str] = ()) -> float:
        return sum(part(config, name, whole_over=whole_over) for name in ("embed", "head"))

    def head(whole_over: Collection[str] = ()) -> tuple[float, float]:
        """Return the parameters that make logits, and those of the first dense layers."""
        # The embedding table, without the first dense layers of the same part.
        table = part(with_dense_layers(config), "embed", whole_over=whole_over)
        first = part(config, "embed", whole_over=whole_over) - table
        tied = config.model.tie_embeddings
        return table if tied else part(config, "head", whole_over=whole_over), first

    projection, first = head(STORAGE_AXES)
    return WeightsOfParts(
        layer_at_rest=part(config, "layers"),
        layer_over_fsdp=part(config, "layers", whole_over=("fsdp",)),
        layer_gathered=part(config, "layers", whole_over=STORAGE_AXES),
        outside_layer=part(config, "outside"),
        ends=ends(),
        ends_over_fsdp=ends(("fsdp",)),
        projection=projection,
        shared_at_rest=sum(head()),
        shared=projection + first,
    )


def stash_width(config: Config) -> float:
    """Return the width of what a layer's I leaves to its W on the scheduled engine.

    These are the gradients of results of products and norms (a gate and what it multiplies share
    one), and the recomputed results from which W computes its operands.
    """
    layer, pipeline = layer_of(config), config.pipeline
    policy = remat_policy(pipeline)
    if policy.everything or not (pipeline.remat_iterations or pipeline.remat_layers):
        return layer.gradient_width
    return layer.gradient_width + layer.recomputed_operand_width(policy.device)


def handed_over_width(config: Config) -> float:
    """Return the width of what a layer's I leaves to its W on the MPMD engine.

    These are the operands of products, the gradients of their results, and what the slicing does
    not take apart further: norms in float32, and activation functions.
    """
    layer = layer_of(config)
    norms = sum(scale.bytes for scale in layer.scales) / itemsize(config.model.dtype)
    return layer.operand_width + layer.weight_result_width + norms + layer.activated_width


def working_width(config: Config, *, on_tpus: bool = False) -> float:
    """Return the width of what the backward of a layer holds at its widest moment.

    It holds all tensors, and the gradients of those that one product reads. Keys and values are
    those of whole sequences, tokens at experts those of all devices that share experts, each with a
    gradient. Each array of scores (see `made_width`) also has a gradient, except on TPUs, where
    XLA computes the gradients of scores within the products that read them.

    Args:
      config: the resolved configuration, with its kernels chosen.
      on_tpus: whether the devices are TPUs.
    """
    layer = layer_of(config)
    scores = (2 - on_tpus) * (made_width(config) - layer.result_width)
    others = (config.mesh.size("context") - 1) * layer.key_value_width
    if config.model.moe.experts and (devices := config.mesh.size(EXPERT_AXIS)) > 1:
        # Tokens of all devices, and what this device's experts add to them.
        others += 2 * devices * config.model.embed_dim
    made = layer.result_width + layer.elementwise_width + scores
    return made + layer.widest_gradients + 2 * others


def axis_rules(config: Config) -> AxisRules:
    """Return the logical axis rules, bound to an abstract mesh of the configured sizes."""
    return _axis_rules(_rules(config), _sizes(config))


def _sizes(config: Config) -> Sizes:
    return tuple((axis, config.mesh.size(axis)) for axis in MESH_AXES)


def _rules(config: Config) -> Rules:
    return tuple((name, tuple(axes)) for name, axes in config.sharding.logical_axis_rules)


@cache
def _layer(model: ModelConfig, sequence_length: int, rules: Rules, sizes: Sizes) -> Layer:
    axis_rules = _axis_rules(rules, sizes)

    def dimension_shards(spec: ParamSpec) -> list[int]:
        computing = spec_in_use(axis_rules, spec)
        entries = [*computing, *[None] * (len(spec.shape) - len(computing))]
        return [_shards(PartitionSpec(entry), sizes) for entry in entries]

    trace = trace_model(model, sequence_length, dict(sizes)[EXPERT_AXIS])
    return read_layer(trace, dimension_shards)


@cache
def _device_parameters(
    model: ModelConfig,
    part: str,
    rules: Rules,
    sizes: Sizes,
    whole_over: tuple[str, ...],
    only_trained: bool,
) -> float:
    axis_rules = _axis_rules(rules, sizes)
    is_outside = part == "outside"
    specs: list[ParamSpec] = jax.tree.leaves(
        model_program(model).specs["layers" if is_outside else part],
        is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
    )

    def shards(spec: ParamSpec) -> int:
        gathered = set(whole_over) - axes_in_use(axis_rules, spec)
        axes = outer_axes(spec) if is_outside else spec.axes
        return _shards(without(axis_rules.spec(axes, spec.shape), gathered), sizes)

    return sum(
        math.prod(spec.shape) / shards(spec) for spec in specs if not (only_trained and spec.frozen)
    )


def _axis_rules(rules: Rules, sizes: Sizes) -> AxisRules:
    names, counts = zip(*sizes, strict=True)
    return AxisRules(rules, AbstractMesh(counts, names))


def _shards(spec: PartitionSpec, sizes: Sizes) -> int:
    """Return the number of devices over which an array with this spec is split."""
    size_of = dict(sizes)
    names = (
        n for entry in spec if entry for n in (entry if isinstance(entry, tuple) else (entry,))
    )
    return math.prod(size_of[name] for name in names)
