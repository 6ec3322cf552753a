"""Keep an optimizer's moments in bfloat16, rounded stochastically.

A bfloat16 number has 8 bits: a moment that changes by less than a 512th would be rounded to what it
was. Rounded up or down at random, with probabilities that preserve the mean, it follows on average
(Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"). What is drawn depends on the
step, the parameter and the index of the layer: it is the same on all engines and after a restart.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike, DTypeLike

from maxpipe.model.parameters import Params, ParamSpec
from maxpipe.training.mirrors import map_by_parameter


@dataclass(frozen=True, eq=False)
class Source:
    """A digest of a parameter's path, and the model-order index of each of its layers.

    `layers` has the shape of the leading layer dimensions.
    """

    path: np.uint32
    layers: np.ndarray

    def draw(self, step: jax.Array, number: int, shape: tuple[int, ...]) -> jax.Array:
        """Return random bits for one of the moments, uint16 of this shape."""
        layers = self.layers.reshape(self.layers.shape + (1,) * (len(shape) - self.layers.ndim))
        element = jnp.zeros((), jnp.uint32)
        for i in range(self.layers.ndim, len(shape)):
            element = element * shape[i] + jax.lax.broadcasted_iota(jnp.uint32, shape, i)
        bits = _mixed(self.path, step, number, jnp.asarray(layers), element)
        return (jnp.broadcast_to(bits, shape) >> 16).astype(jnp.uint16)


def _mixed(*words: ArrayLike) -> jax.Array:
    """Return uint32 that change in about half of their bits with each bit of a word.

    Each goes through "lowbias32" (Wellons 2018, "Prospecting for Hash Functions"). jax.random takes
    ten times as many operations, and as long as the rest of the update.
    """
    x = jnp.zeros((), jnp.uint32)
    for word in words:
        x = x ^ jnp.asarray(word).astype(jnp.uint32)
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        x = x ^ (x >> 16)
    return x


def sources(specs: Params, layer_index: np.ndarray | Sequence[np.ndarray]) -> Params:
    """Return a tree of `Source`s like the specs, which are of a model or a stage of mpmd.

    `layer_index` is that of the engine.
    """

    def source(path: KeyPath, spec: ParamSpec) -> Source:
        names: list[object] = [getattr(key, "key", key) for key in path]
        layers = np.zeros((), np.int32)
        if names[0] == "chunks":
            layers = layer_index[int(str(names[1]))]
            names = ["layers", *names[2:]]
        elif names[0] == "layers":
            layers = np.asarray(layer_index)
        return Source(np.uint32(zlib.crc32(".".join(map(str, names)).encode())), layers)

    return jax.tree_util.tree_map_with_path(
        source, specs, is_leaf=lambda node: isinstance(node, ParamSpec)
    )


def cast(state: optax.OptState, old: DTypeLike, new: DTypeLike) -> optax.OptState:
    return jax.tree.map(lambda x: x.astype(new) if x.ndim and x.dtype == old else x, state)


def rounded(
    state: optax.OptState, before: optax.OptState, of: Params, step: jax.Array
) -> optax.OptState:
    """Return a state with the dtypes of the one `before`; `of` has the source of each parameter."""
    numbers = Counter[Source]()

    def store(old: jax.Array, new: jax.Array, source: Source) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return new
        numbers[source] += 1  # each moment of a parameter has its own bits
        return to_bfloat16(new, source.draw(step, numbers[source], new.shape))

    no_parameter = Source(np.uint32(0), np.zeros((), np.int32))
    by_leaf = map_by_parameter(lambda leaf, source: source, before, of, no_parameter)
    return jax.tree.map(store, before, state, by_leaf)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round finite float32 to one of the two nearest bfloat16, up with the share of what is cut.

    bfloat16 is the upper half of float32, so a uniform uint16, added to the lower half, carries
    over with just that probability.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((word >> 16).astype(jnp.uint16), jnp.bfloat16)
