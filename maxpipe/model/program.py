"""Provide the model to engines, as pure functions over plain pytrees.

Parameters are {"embed": ..., "layers": ..., "head": ...}; `layers` is one layer's tree with leading
layer dimensions that the engine chooses. The first dense layers of a model of experts belong to
`embed`, {"embedding": ..., "first": {"0": ..., "1": ...}}. Shapes: B batch, T sequence, D embed, V
vocabulary.
"""

from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx

from maxpipe.config.catalog import BLOCKS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation
from maxpipe.config.sections import ModelConfig
from maxpipe.model import parameters
from maxpipe.model.attention import AttentionFn
from maxpipe.model.experts.mixture import ExpertsFn, ExpertWeights
from maxpipe.model.kernels.dot_product import dot_product_attention
from maxpipe.model.layers import COUNTS, RANK_AXIS, AuxiliaryLosses, RMSNorm, SideInputs
from maxpipe.model.output_loss import OutputLoss
from maxpipe.model.parameters import (
    Params,
    ParamSpec,
    declare,
    map_specs,
    outer_axes,
    split_module,
)
from maxpipe.sharding.attention_contract import PLAIN, AttentionOptions

UNNAMED = "auxiliary_loss"  # name for a block that returns a number, not losses by name


class Embedding(nnx.Module):
    """Token embedding table."""

    def __init__(self, config: ModelConfig):
        shape, axes = (config.vocab_size, config.embed_dim), ("vocab", "outer_embed")
        self.embedding = declare(shape, axes, config.param_dtype, stddev=0.02)


class Head(nnx.Module):
    """Final norm and, unless embeddings are tied, output projection."""

    def __init__(self, config: ModelConfig):
        self.norm = RMSNorm(
            config.embed_dim,
            eps=config.norm_eps,
            dtype=config.param_dtype,
            offset=config.norm_offset,
        )
        if not config.tie_embeddings:
            shape, axes = (config.embed_dim, config.vocab_size), ("outer_embed", "vocab")
            self.kernel = declare(shape, axes, config.param_dtype, stddev=0.02)

    def normalise(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the final norm, [..., D] -> [..., D]."""
        return self.norm(x_BTD)


def _shape_of_context(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    options: AttentionOptions = PLAIN,
) -> jax.Array:
    return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)


def _shape_of_sums(
    x: jax.Array, choice: jax.Array, combine: jax.Array, weights: ExpertWeights
) -> jax.Array:
    return x


def _with_frozen_base(specs: Params, block: str) -> Params:
    """Return the specs of a model of which only the adapters are trained."""

    def freeze(spec: ParamSpec) -> ParamSpec:
        return spec if RANK_AXIS in spec.axes else replace(spec, frozen=True)

    specs = map_specs(freeze, specs)
    if not parameters.count(parameters.trainable(specs, specs)):
        message = f"model.block={block} declares no adapters; use 0, or model.block=llama"
        raise ConfigError(Problem("model.lora.rank", message))
    return specs


class ModelProgram:
    """The model of one configuration, with one function for attention and one for experts.

    `params` below are the outer parameters {"embed", "head"}, floating leaves in the compute dtype.

    Raises:
      ValueError: `model.block` is not in the catalogue.
      ConfigError: the block declares none of the adapters that `model.lora` asks for.

    Attributes:
      config: the model's section of the configuration.
      specs: {"embed", "layers" (of one layer), "head"}, trees of `ParamSpec`.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: AttentionFn = dot_product_attention,
        experts: ExpertsFn | None = None,
    ):
        if config.block not in BLOCKS:
            choices = ", ".join(BLOCKS)
            raise ValueError(
                f"model.block={config.block!r} does not exist; choose one of {choices}"
            )
        block = implementation(BLOCKS[config.block])
        self.config = config

        def make_block(attention: AttentionFn, experts: ExpertsFn | None) -> nnx.Module:
            functions = (experts,) if config.moe.experts else ()
            return block(config, attention, *functions)

        self._make_block = make_block
        self._apply_block, layers = split_module(lambda: make_block(attention, experts))
        self._apply_head, head = split_module(lambda: Head(config))
        _, embed = split_module(lambda: Embedding(config))
        if config.first_dense_layers:
            self._apply_first, first = split_module(lambda: block(config.dense, attention))
            first = map_specs(lambda spec: replace(spec, axes=outer_axes(spec)), first)
            embed["first"] = {str(i): first for i in range(config.first_dense_layers)}
        self._output = OutputLoss.of(config)
        self.specs = {"embed": embed, "layers": layers, "head": head}
        if config.lora.rank:
            self.specs = _with_frozen_base(self.specs, config.block)

    @property
    def needs_key(self) -> bool:
        """Return whether `block` draws random numbers."""
        return self.config.dropout > 0 or self.config.lora.dropout > 0

    @property
    def auxiliary_names(self) -> tuple[str, ...]:
        """Return the names of the auxiliary losses of `block`."""
        return tuple(self._auxiliary_shapes)

    @cached_property
    def _auxiliary_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each auxiliary loss, summed over layers; `block` is traced for it."""
        apply, _ = split_module(lambda: self._make_block(_shape_of_context, _shape_of_sums))

        def side_inputs() -> SideInputs:
            ids = jnp.zeros((1, 1), jnp.int32)
            return SideInputs(ids, ids, ids[0], ids[0, 0])

        def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(spec.shape, spec.compute_dtype(self.config.dtype))

        x = jax.ShapeDtypeStruct((1, 1, self.config.embed_dim), jnp.dtype(self.config.dtype))
        layer, side = map_specs(shape, self.specs["layers"]), jax.eval_shape(side_inputs)
        _, auxiliary = jax.eval_shape(apply, layer, x, side, None)
        if not isinstance(auxiliary, dict):
            return {UNNAMED: ()}
        rows = (self.config.stacked_layers,)
        return {
            name: (*rows, *value.shape) if name in COUNTS else value.shape
            for name, value in auxiliary.items()
        }

    def parameter_count(self) -> int:
        """Return the number of parameters of all layers, embedding and head."""
        outer = {"embed": self.specs["embed"], "head": self.specs["head"]}
        layer = parameters.count(self.specs["layers"])
        return parameters.count(outer) + self.config.stacked_layers * layer

    def cast(self, params: Params) -> Params:
        """Cast floating leaves to the dtype in which they are used.

        Args:
          params: a tree like `specs`, some of its parts by name, or one layer.
        """
        is_layer = not params.keys() <= self.specs.keys()
        specs = self.specs["layers"] if is_layer else {n: self.specs[n] for n in params}

        def cast(spec: ParamSpec, p: jax.Array) -> jax.Array:
            dtype = jnp.dtype(spec.compute_dtype(self.config.dtype))
            return p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p

        return map_specs(cast, specs, params)

    def no_auxiliary(self) -> AuxiliaryLosses:
        """Return auxiliary losses of 0, to which the layers' losses are added."""
        return {name: jnp.zeros(s, jnp.float32) for name, s in self._auxiliary_shapes.items()}

    @jax.named_scope("embedding")
    def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Look up token ids int32 [...]: activations [..., D] in the compute dtype."""
        return self.scale_embedding(params["embed"]["embedding"][tokens].astype(self.config.dtype))

    def scale_embedding(self, x: jax.Array) -> jax.Array:
        """Multiply rows of the embedding table by `model.embed_scale`, rounded to their dtype."""
        return x if (scale := self.config.embed_scale) == 1 else x * jnp.asarray(scale, x.dtype)

    @jax.named_scope("layer")
    def block(
        self, layer: Params, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, AuxiliaryLosses]:
        """Apply one layer: x [B, T, D] -> (activations, auxiliary losses by name)."""
        y, auxiliary = self._apply_block(layer, x_BTD, side, key)
        if not isinstance(auxiliary, dict):
            return y, {UNNAMED: auxiliary}
        if counts := {name: auxiliary[name] for name in COUNTS if name in auxiliary}:
            # [...] -> [N, ...]; a padding layer, whose index is N, has no row.
            index = jnp.asarray(side.layer_index) - self.config.first_dense_layers
            row = jax.nn.one_hot(index, self.config.stacked_layers, dtype=jnp.float32)
            by_layer = {name: jnp.multiply.outer(row, count) for name, count in counts.items()}
            auxiliary = auxiliary | by_layer
        return y, auxiliary

    @jax.named_scope("layer")
    def first_block(
        self, layer: Params, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> jax.Array:
        """Apply one of the first dense layers, which have no auxiliary losses: [B, T, D]."""
        y, auxiliary = self._apply_first(layer, x_BTD, side, key)
        assert not auxiliary, "dense layers have no auxiliary losses"
        y_BTD: jax.Array = y
        return y_BTD

    @jax.named_scope("head")
    def logits(self, params: Params, x_BTD: jax.Array) -> jax.Array:
        """Compute logits [..., V] of activations [..., D], float32; -inf for padding."""
        return self._output.logits(*self._projection(params, x_BTD))

    @jax.named_scope("head")
    def head_loss(
        self, params: Params, x_BTD: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Sum the weighted losses of tokens.

        Args:
          params: outer parameters.
          x_BTD: activations [..., D].
          targets: int32 [...], token ids.
          weights: float32 [...]; 0 for tokens that do not count.

        Returns:
          (loss, cross_entropy), float32 scalars: sums over tokens of weight * value. The loss adds
          the z-loss term; the cross-entropy is a figure to report, without a gradient.
        """
        return self._output.losses(*self._projection(params, x_BTD), targets, weights)

    def _projection(self, params: Params, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (normalised activations, kernel [D, V] in their dtype), the factors of logits."""
        x = self._apply_head(params["head"], x_BTD, method="normalise")
        tied = self.config.tie_embeddings
        kernel = params["embed"]["embedding"].T if tied else params["head"]["kernel"]
        return x, kernel.astype(x.dtype)
