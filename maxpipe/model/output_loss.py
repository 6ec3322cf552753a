"""Compute logits and cross-entropy from activations, optionally tile by tile over the tokens.

With tiles the logits of all tokens never exist at once. Letters: N tokens of a row (or of a stage's
share), P tokens of a tile, D embed, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.config.sections import ModelConfig
from maxpipe.model.layers import project

Losses: TypeAlias = tuple[jax.Array, jax.Array]  # (loss, cross-entropy), float32 scalars


class Tiles(NamedTuple):
    """The tokens of a row in tiles, as `lax.scan` walks through them: [tiles, ..., P(, D)]."""

    x: jax.Array
    targets: jax.Array
    weights: jax.Array


class Gradients(NamedTuple):
    """Gradients of the loss, for a cotangent of 1: of x [..., N, D] and of the kernel [D, V]."""

    x: jax.Array
    kernel: jax.Array


@dataclass(frozen=True)
class OutputLoss:
    """Logits and losses of activations.

    Attributes:
      soft_cap: c of c * tanh(logits / c); 0 leaves logits as they are.
      z_loss: weight of the squared log-partition.
      tiles: number of tiles that the tokens are cut into.
      scale: factor of products of activations and kernel, before the cap.
      num_token_ids: number of ids that are not padding; logits beyond are -inf; 0 = no padding.
    """

    soft_cap: float
    z_loss: float
    tiles: int
    scale: float = 1.0
    num_token_ids: int = 0

    @classmethod
    def of(cls, m: ModelConfig) -> "OutputLoss":
        """Return the output loss of a model."""
        num_token_ids = m.num_token_ids if m.num_token_ids < m.vocab_size else 0
        return cls(m.logit_soft_cap, m.z_loss, m.logit_tiles, m.logit_scale, num_token_ids)

    def logits(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Compute logits [..., V], float32, of activations [..., D] and a kernel [D, V]."""
        return self._cap(_products(x, kernel))

    def losses(
        self, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> Losses:
        """Sum the weighted losses of tokens.

        Args:
          x: activations [..., N, D].
          kernel: [D, V], in the dtype of `x`.
          targets: int32 [..., N].
          weights: float32 [..., N].

        Returns:
          (loss, cross_entropy), float32 scalars; the second is a figure to report, without a
          gradient.
        """
        compute = _tiled_losses if self.tiles > 1 else _all_losses
        loss, cross_entropy = compute(self, x, kernel, targets, weights)
        return loss, lax.stop_gradient(cross_entropy)

    def of_products(self, products: jax.Array, targets: jax.Array, weights: jax.Array) -> Losses:
        """Compute `losses` from products [..., V] of activations and kernel."""
        logits = self._cap(products)
        log_z = jax.nn.logsumexp(logits, axis=-1)  # [...]
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]  # [...]
        cross_entropy = jnp.sum(weights * (log_z - target_logits))
        if not self.z_loss:
            return cross_entropy, cross_entropy
        return cross_entropy + self.z_loss * jnp.sum(weights * jnp.square(log_z)), cross_entropy

    def _cap(self, products: jax.Array) -> jax.Array:
        products = products if self.scale == 1 else products * self.scale
        if self.soft_cap:
            products = self.soft_cap * jnp.tanh(products / self.soft_cap)
        if not self.num_token_ids:
            return products
        is_token = lax.iota(jnp.int32, products.shape[-1]) < self.num_token_ids
        return jnp.where(is_token, products, -jnp.inf)


def _products(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return project(x, kernel, 1, jnp.float32)


def _all_losses(
    output: OutputLoss, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> Losses:
    return output.of_products(_products(x, kernel), targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled_losses(
    output: OutputLoss, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> Losses:
    def add(total: Losses, tile: Tiles) -> tuple[Losses, None]:
        losses = _all_losses(output, tile.x, kernel, tile.targets, tile.weights)
        return jax.tree.map(jnp.add, total, losses), None

    zero = jnp.zeros((), jnp.float32)
    return lax.scan(add, (zero, zero), _cut(output.tiles, x, targets, weights))[0]


def _forward(
    output: OutputLoss, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Losses, Gradients]:
    """Compute the losses, and in the same pass their gradients.

    The loss is a scalar, so the backward pass only scales them, and no tile's logits are computed
    a second time.
    """
    gradient_fn = jax.value_and_grad(output.of_products, has_aux=True)

    def add(
        carry: tuple[Losses, jax.Array], tile: Tiles
    ) -> tuple[tuple[Losses, jax.Array], jax.Array]:
        total, kernel_gradient = carry
        losses, gradient = gradient_fn(_products(tile.x, kernel), tile.targets, tile.weights)
        gradient = gradient.astype(x.dtype)  # [..., P, V]
        # Summed over tiles in float32, and rounded once: [..., P, D] x [..., P, V] -> [D, V]
        more = jnp.einsum("...pd,...pv->dv", tile.x, gradient, preferred_element_type=jnp.float32)
        total = jax.tree.map(jnp.add, total, losses)
        return (total, kernel_gradient + more), jnp.matmul(gradient, kernel.T)

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero), jnp.zeros(kernel.shape, jnp.float32)
    tiles = _cut(output.tiles, x, targets, weights)
    (losses, kernel_gradient), x_gradient = lax.scan(add, start, tiles)
    return losses, Gradients(_join(x_gradient, x.shape), kernel_gradient.astype(kernel.dtype))


def _backward(
    output: OutputLoss, gradients: Gradients, cotangents: Losses
) -> tuple[jax.Array, jax.Array, None, None]:
    x, kernel = ((cotangents[0] * g).astype(g.dtype) for g in gradients)
    return x, kernel, None, None


_tiled_losses.defvjp(_forward, _backward)


def _cut(tiles: int, x: jax.Array, targets: jax.Array, weights: jax.Array) -> Tiles:
    """Cut x [..., N, D], targets and weights [..., N] into tiles; tokens beyond N have weight 0.

    A tile takes every tiles-th token, so that none leaves its device where tokens are split.
    """
    axis = targets.ndim - 1
    tiles = min(tiles, targets.shape[axis])

    def cut(a: jax.Array, axis: int) -> jax.Array:
        missing = -a.shape[axis] % tiles
        a = jnp.pad(a, [(0, missing if i == axis else 0) for i in range(a.ndim)])
        # [..., N, D] -> [..., P, tiles, D] -> [tiles, ..., P, D]
        a = a.reshape(*a.shape[:axis], -1, tiles, *a.shape[axis + 1 :])
        return jnp.moveaxis(a, axis + 1, 0)

    return Tiles(cut(x, axis), cut(targets, axis), cut(weights, axis))


def _join(tiled: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `_cut`: [tiles, ..., P, D] -> [..., N, D]."""
    # [tiles, ..., P, D] -> [..., P, tiles, D] -> [..., P tiles, D] -> [..., N, D]
    joined = jnp.moveaxis(tiled, 0, -2)
    joined = joined.reshape(*shape[:-2], -1, shape[-1])
    return lax.slice_in_dim(joined, 0, shape[-2], axis=joined.ndim - 2)
