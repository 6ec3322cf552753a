"""Collect what the closed forms need to know about a model, once for each way to split it.

Reading a model takes JAX, which traces one layer on shapes. Nothing after that needs JAX: the same
facts serve every candidate that splits the model alike.
"""

from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import MESH_AXES, Config, ModelConfig
from maxpipe.model.kernels.splash import filled
from maxpipe.model.layer_facts import visible_share
from maxpipe.pipeline.chunk import remat_policy
from maxpipe.pipeline.weights import STORAGE_AXES
from maxpipe.plan.flops import model_flops_per_token
from maxpipe.plan.footprint import (
    cheap_width,
    device_parameters,
    first_layers_width,
    handed_over_width,
    held_width,
    holds_scores,
    itemsize,
    layer_of,
    made_width,
    offloaded_width,
    on_platform,
    optimizer_bytes,
    residual_width,
    scores_of_token,
    stash_width,
    total_parameters,
    weights_of_parts,
    with_dense_layers,
    working_width,
)
from maxpipe.plan.layer_trace import trace_model
from maxpipe.plan.number import FLOAT32, Number
from maxpipe.plan.search.machine import platform_of
from maxpipe.plan.search.space import Axes
from maxpipe.plan.weights_held import WeightsOfParts
from maxpipe.sharding.collectives import CONTEXT_AXIS, EXPERT_AXIS

# Weights are gathered over these axes for the computation; experts stay where they are.
_WHOLE_IN_USE = frozenset(STORAGE_AXES) - {EXPERT_AXIS}


class Parameters(NamedTuple):
    """Parameters on one device, as numbers of values.

    Attributes:
      at_rest: all parameters, as if layers divided evenly over the stages.
      layer_at_rest, layer_gathered: parameters of a layer, the second whole over all storage axes.
      outer_at_rest: parameters of embedding and head.
      embed_gathered, head_gathered: parameters of each, whole over all storage axes.
      embed_of_stage, head_of_stage: parameters of each where it lies on the devices of one stage.
      parts: the same by parts of the model, as the closed forms of memory take them.
    """

    at_rest: float
    layer_at_rest: float
    layer_gathered: float
    outer_at_rest: float
    embed_gathered: float
    head_gathered: float
    embed_of_stage: float
    head_of_stage: float
    parts: WeightsOfParts


class LayerCosts(NamedTuple):
    """A layer on one device; FLOPs are per token of the device, widths in values per token.

    Attributes:
      weight_flops, attention_flops: FLOPs of a forward; attention's are those of its kernel.
      scores: scores of a token, if the kernel of attention holds all of them; else 0.
      expert_flops: the part of weight_flops that multiplies rows with their experts' weights.
      expert_weights: weights of the device's experts.
      results: width of its products' results.
      made: the same with scores, as in `footprint.made_width`.
      elementwise: width of what its norms and sums make.
      rows: width of the rows of experts, and of those that are added up to tokens.
      key_values: width of what attention reads besides queries.
      working: width of what a layer's backward holds at its widest moment.
    """

    weight_flops: float
    attention_flops: float
    scores: float
    expert_flops: float
    expert_weights: float
    results: float
    made: float
    elementwise: float
    rows: float
    key_values: float
    working: float


class Saving(NamedTuple):
    """What a policy of rematerialisation, or each of several, saves and computes again.

    Attributes:
      residuals: width that a layer saves on the device besides the input of its chunk.
      offloaded: width that it saves in the host's memory.
      stash: width that an I leaves to its W.
      handed_over: the same on an engine with a program for each unit.
      saves_all: 1 where nothing is computed again, else 0.
      held: width of what a chunk's backward holds of each layer except its current one.
      cheap: width of what it would also hold if it did not recompute cheap values.
      recomputed: share of a layer's forward that its backward computes again.
      scores_again: 1 where that share leaves out scores that the backward computes again, else 0.
      first_kept: width that the first dense layers keep of a microbatch.
      first_handed_over: width that an I of these layers leaves to its W on that engine.
      first_recomputed: share of their forward that their backward computes again.
    """

    residuals: Number
    offloaded: Number
    stash: Number
    handed_over: Number
    saves_all: Number
    held: Number
    cheap: Number
    recomputed: Number
    scores_again: Number
    first_kept: Number
    first_handed_over: Number
    first_recomputed: Number


class _Key(NamedTuple):
    """What decides how a layer computes.

    Attributes:
      axes: sizes of the axes that split it; 1 for the others.
      parts: parts of a sequence, by which the kernel of attention is chosen.
    """

    axes: Axes
    parts: int


class Facts:
    """What is known about one model, read when it is first needed.

    Args:
      config: the model, sequence length, logical axis rules and whatever candidates do not change.
      platform: JAX's name of the devices' platform, which decides kernels; "" to take kernels as
        configured. By default that of `compile.topology`.
      only_trained: whether frozen parameters are left out.
    """

    def __init__(self, config: Config, platform: str | None = None, *, only_trained: bool = False):
        self.config = config
        self._platform = platform_of(config) if platform is None else platform
        self._only_trained = only_trained
        self._parameters: dict[Axes, Parameters] = {}
        self._computing_on: dict[_Key, Config] = {}
        self._layers: dict[_Key, LayerCosts] = {}
        self._savings: dict[tuple[_Key, str, str, bool], Saving] = {}
        self._splitting = {
            axis
            for name, axes in config.sharding.logical_axis_rules
            if not str(name).startswith("activation_")
            for axis in axes
        }

    @cached_property
    def of_first_layers(self) -> "Facts | None":
        """Return the facts of a model of first dense layers alone; None if there are none."""
        if not self.config.model.first_dense_layers:
            return None
        return Facts(with_dense_layers(self.config), self._platform)

    @cached_property
    def trained(self) -> "Facts":
        """Return the facts of the parameters that have a gradient; these if all have one."""
        if not self.config.model.lora.rank:
            return self
        return Facts(self.config, self._platform, only_trained=True)

    @cached_property
    def model_flops_per_token(self) -> float:
        """Return the model FLOPs of a token, forward and backward."""
        return model_flops_per_token(self.config.model, self.config.data.sequence_length)

    @cached_property
    def head_flops(self) -> float:
        return trace_model(self.config.model, self.config.data.sequence_length).head_flops

    def least_state_bytes(self) -> float:
        """Return the bytes of parameters, optimizer state and gradients over all devices."""
        config = self.config
        each = itemsize(config.model.param_dtype) + optimizer_bytes(config) + FLOAT32
        return each * self.parameters((1,) * len(MESH_AXES)).at_rest

    def parameters(self, axes: Axes) -> Parameters:
        key = tuple(
            n if name in self._splitting or name == "stage" else 1
            for name, n in zip(MESH_AXES, axes, strict=True)
        )
        if key not in self._parameters:
            config, only_trained = self._on(key), self._only_trained
            part = partial(device_parameters, config, only_trained=only_trained)
            self._parameters[key] = Parameters(
                at_rest=total_parameters(config, only_trained=only_trained),
                layer_at_rest=part("layers"),
                layer_gathered=part("layers", whole_over=STORAGE_AXES),
                outer_at_rest=part("embed") + part("head"),
                embed_gathered=part("embed", whole_over=STORAGE_AXES),
                head_gathered=part("head", whole_over=STORAGE_AXES),
                embed_of_stage=part("embed", without_stages=True),
                head_of_stage=part("head", without_stages=True),
                parts=weights_of_parts(config, only_trained=only_trained),
            )
        return self._parameters[key]

    def layer(self, axes: Axes) -> LayerCosts:
        key = self._computing(axes)
        if key not in self._layers:
            config = self._computed(key)
            layer, split = layer_of(config), config.mesh.size("tensor")
            moe, expert_flops = config.model.moe, layer.expert_flops / split
            # A token uses some of the experts, with two FLOPs for each of their weights.
            sharing = config.mesh.size(EXPERT_AXIS)
            used = 2.0 * moe.per_token * sharing / max(1, moe.experts)
            # A device sums rows for the tokens of all devices that share experts.
            others = (sharing - 1) * moe.per_token * config.model.embed_dim
            self._layers[key] = LayerCosts(
                weight_flops=layer.weight_flops / split,
                attention_flops=self._kernel_share(config) * layer.activation_flops / split,
                scores=scores_of_token(config),
                expert_flops=expert_flops,
                expert_weights=expert_flops / used if used else 0.0,
                results=layer.result_width,
                made=made_width(config),
                elementwise=layer.elementwise_width - layer.gathered_width,
                rows=layer.gathered_width + others,
                key_values=layer.key_value_width,
                working=working_width(config, on_tpus=self._platform == "tpu"),
            )
        return self._layers[key]

    def saving(self, axes: Axes, engine: str, policy: str, *, scans: bool) -> Saving:
        """Return what a policy saves on a device of a mesh; `scans` as in `Block`."""
        key = (self._computing(axes), engine, policy, scans)
        if key not in self._savings:
            changes = {
                "pipeline.engine": engine,
                "pipeline.remat_policy": policy,
                "pipeline.scan_layers": scans,
            }
            config = update(self._computed(key[0]), changes)
            pipeline, passes = config.pipeline, 1
            if ENGINES[engine].has_stages:
                passes = pipeline.remat_iterations + pipeline.remat_layers
            recomputed = passes * _recomputed(config)
            # Each of the first dense layers is computed again by itself.
            has_first = config.model.first_dense_layers > 0
            first = with_dense_layers(config) if has_first else None
            num_first = config.model.first_dense_layers
            self._savings[key] = Saving(
                residuals=residual_width(config),
                offloaded=offloaded_width(config),
                stash=stash_width(config),
                handed_over=handed_over_width(config),
                saves_all=float(remat_policy(config.pipeline).everything),
                held=held_width(config),
                cheap=cheap_width(config),
                recomputed=recomputed,
                scores_again=_scores_again(config),
                first_kept=first_layers_width(config),
                first_handed_over=num_first * handed_over_width(first) if first else 0.0,
                first_recomputed=_recomputed(first) if first else 0.0,
            )
        return self._savings[key]

    def _computing(self, axes: Axes) -> "_Key":
        split = tuple(
            n if name in self._splitting and name not in _WHOLE_IN_USE else 1
            for name, n in zip(MESH_AXES, axes, strict=True)
        )
        return _Key(split, axes[MESH_AXES.index(CONTEXT_AXIS)])

    def _computed(self, key: "_Key") -> Config:
        """Return the configuration, with kernels chosen, on a mesh that splits a layer by `key`."""
        if key not in self._computing_on:
            config = self._on(key.axes)
            if self._platform:
                parted = update(config, {f"mesh.ici.{CONTEXT_AXIS}": key.parts})
                config = replace(config, model=on_platform(parted, self._platform).model)
            self._computing_on[key] = config
        return self._computing_on[key]

    def _kernel_share(self, config: Config) -> float:
        """Return the FLOPs that attention's kernel computes, as a multiple of attention's FLOPs."""
        if holds_scores(config):  # masked ones, too
            return 1 / visible_share(config.model, config.data.sequence_length)
        return _filled_share(config.model) if self._platform == "tpu" else 1.0

    def _on(self, axes: Axes) -> Config:
        sizes = {f"mesh.ici.{axis}": n for axis, n in zip(MESH_AXES, axes, strict=True)}
        return update(self.config, sizes | {f"mesh.dcn.{axis}": 1 for axis in MESH_AXES})


def _filled_share(model: ModelConfig) -> float:
    """Return the FLOPs of latent attention's kernel on TPUs, as a multiple of attention's FLOPs."""
    if not model.is_latent:
        return 1.0  # heads that this kernel would have to pad use another one
    channels = model.head_dim, model.mla.v_head_dim  # of a query and of a value
    return sum(map(filled, channels)) / sum(channels)


def _recomputed(config: Config) -> float:
    """Return the share of a layer's forward that one recomputation of it takes."""
    policy, layer = remat_policy(config.pipeline), layer_of(config)
    if policy.everything:
        return 0.0
    flops = layer.recomputed_flops((*policy.device, *policy.host))
    return flops / (layer.weight_flops + layer.activation_flops)


def _scores_again(config: Config) -> float:
    """Return 1 where a backward recomputes scores whose product's result is saved, else 0."""
    policy = remat_policy(config.pipeline)
    if policy.everything or not holds_scores(config):
        return 0.0
    return float("context" in (*policy.device, *policy.host))
