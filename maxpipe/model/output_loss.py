"""Cross-entropy behind the output projection, tile by tile if need be: logits of all tokens then never exist at once.

Letters: N tokens of a row (or of a stage's share), P tokens of a tile, D embed, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxpipe.model.layers import project

Losses = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class OutputLoss:
    """Logits and losses of activations.

    Attributes:
      soft_cap: c of c * tanh(logits / c); 0 leaves logits as they are.
      z_loss: weight of the squared log-partition.
      tiles: pieces of the tokens that are worked through one after another.
    """

    soft_cap: float
    z_loss: float
    tiles: int

    def logits(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Activations [..., D] and kernel [D, V] -> logits [..., V], float32."""
        return self._capped(_project(x, kernel))

    def losses(
        self, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> Losses:
        """Weighted token losses, summed.

        Args:
          x: activations [..., N, D].
          kernel: [D, V], in the dtype of `x`.
          targets: int32 [..., N].
          weights: float32 [..., N].

        Returns:
          (loss, cross_entropy), float32 scalars; the second is a figure to report, without a
          gradient.
        """
        run = _tiled if self.tiles > 1 else _whole
        loss, cross_entropy = run(self, x, kernel, targets, weights)
        return loss, lax.stop_gradient(cross_entropy)

    def of_products(self, products: jax.Array, targets: jax.Array, weights: jax.Array) -> Losses:
        """As `losses`, from products [..., V] of activations and kernel."""
        logits = self._capped(products)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        cross_entropy = jnp.sum(weights * (log_z - picked))
        if not self.z_loss:
            return cross_entropy, cross_entropy
        return cross_entropy + self.z_loss * jnp.sum(weights * jnp.square(log_z)), cross_entropy

    def _capped(self, products: jax.Array) -> jax.Array:
        return self.soft_cap * jnp.tanh(products / self.soft_cap) if self.soft_cap else products


def _project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return project(x, kernel, 1, jnp.float32)


def _whole(
    output: OutputLoss, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> Losses:
    return output.of_products(_project(x, kernel), targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(
    output: OutputLoss, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> Losses:
    def add(total: Losses, tile: Any) -> tuple[Losses, None]:
        part, tile_targets, tile_weights = tile
        return jax.tree.map(
            jnp.add, total, _whole(output, part, kernel, tile_targets, tile_weights)
        ), None

    zero = jnp.zeros((), jnp.float32)
    return lax.scan(add, (zero, zero), _cut(output.tiles, x, targets, weights))[0]


def _forward(
    output: OutputLoss, x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array
) -> Any:
    """Losses, and at once their gradients: the cotangent is a scalar, so no tile's logits are made a second time."""
    gradient_fn = jax.value_and_grad(output.of_products, has_aux=True)

    def add(carry: Any, tile: Any) -> Any:
        total, kernel_gradient = carry
        part, tile_targets, tile_weights = tile
        losses, gradient = gradient_fn(_project(part, kernel), tile_targets, tile_weights)
        gradient = gradient.astype(x.dtype)
        # Summed over tiles in float32, and rounded once.
        more = jnp.einsum("...pd,...pv->dv", part, gradient, preferred_element_type=jnp.float32)
        return (jax.tree.map(jnp.add, total, losses), kernel_gradient + more), jnp.matmul(
            gradient, kernel.T
        )

    zero = jnp.zeros((), jnp.float32)
    start = (zero, zero), jnp.zeros(kernel.shape, jnp.float32)
    (losses, kernel_gradient), x_gradient = lax.scan(
        add, start, _cut(output.tiles, x, targets, weights)
    )
    return losses, (_joined(x_gradient, x.shape), kernel_gradient.astype(kernel.dtype))


def _backward(output: OutputLoss, gradients: Any, cotangents: Losses) -> Any:
    x, kernel = ((cotangents[0] * g).astype(g.dtype) for g in gradients)
    return x, kernel, None, None


_tiled.defvjp(_forward, _backward)


def _cut(tiles: int, x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    """x [..., N, D], targets and weights [..., N] -> [tiles, ..., P(, D)]; tokens beyond N have weight 0.

    A tile takes every tiles-th token, so that none leaves its device where tokens are split.
    """
    axis = targets.ndim - 1
    tiles = min(tiles, targets.shape[axis])

    def cut(a: jax.Array, axis: int) -> jax.Array:
        missing = -a.shape[axis] % tiles
        a = jnp.pad(a, [(0, missing if i == axis else 0) for i in range(a.ndim)])
        return jnp.moveaxis(
            a.reshape(*a.shape[:axis], -1, tiles, *a.shape[axis + 1 :]), axis + 1, 0
        )

    return cut(x, axis), cut(targets, axis), cut(weights, axis)


def _joined(tiled: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[tiles, ..., P, D] -> [..., N, D]."""
    joined = jnp.moveaxis(tiled, 0, -2)
    joined = joined.reshape(*shape[:-2], -1, shape[-1])
    return lax.slice_in_dim(joined, 0, shape[-2], axis=joined.ndim - 2)
