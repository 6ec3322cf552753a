"""Keep an optimizer's moments in bfloat16, rounded stochastically.

A bfloat16 number has 8 bits: a moment that changes by less than a 512th, as second moments do in
most steps, would be rounded to what it was. Rounded up or down at random, with probabilities that
preserve the mean, it follows on average (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"). What is drawn depends on the step, the parameter and the index of the layer, so that
all engines and layouts draw the same, before and after a restart.
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

from maxpipe.model.parameters import Params, ParamSpec
from maxpipe.training.mirrors import map_by_parameter


@dataclass(frozen=True, eq=False)
class Source:
    """What the random bits of a parameter's moments depend on, besides the step.

    Attributes:
      path: digest of the names on its path, which are the same in every layout.
      layers: index in model order of each of its layers, with the shape of its layer dimensions.
    """

    path: int
    layers: np.ndarray

    def draw(self, step: jax.Array, number: int, shape: tuple[int, ...]) -> jax.Array:
        """Return random bits for one of the moments, uint16 of this shape."""
        key = jax.random.fold_in(jax.random.key(self.path, impl="threefry2x32"), step)
        key = jax.random.fold_in(key, number)
        own = shape[self.layers.ndim :]

        def draw(layer: jax.Array) -> jax.Array:
            return jax.random.bits(jax.random.fold_in(key, layer), own, jnp.uint16)

        for _ in range(self.layers.ndim):
            draw = jax.vmap(draw)
        return draw(jnp.asarray(self.layers))


def sources(specs: Params, layer_index: np.ndarray | Sequence[np.ndarray]) -> Params:
    """Return a tree of `Source`s like the specs.

    Args:
      specs: {"embed", "layers", "head"}, or {"chunks": {chunk: layers}, ...} of a stage.
      layer_index: `layer_index()` of the engine.
    """

    def source(path: KeyPath, spec: ParamSpec) -> Source:
        names: list[object] = [getattr(key, "key", key) for key in path]
        layers = np.zeros((), np.int32)
        if names[0] == "chunks":
            layers = layer_index[int(str(names[1]))]
            names = ["layers", *names[2:]]
        elif names[0] == "layers":
            layers = np.asarray(layer_index)
        return Source(zlib.crc32(".".join(map(str, names)).encode()), layers)

    return jax.tree_util.tree_map_with_path(
        source, specs, is_leaf=lambda node: isinstance(node, ParamSpec)
    )


def narrowed(state: optax.OptState) -> optax.OptState:
    """Return a first state with its arrays in bfloat16; counters stay as they are."""
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.ndim and x.dtype == jnp.float32 else x, state
    )


def widened(state: optax.OptState) -> optax.OptState:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)


def rounded(
    state: optax.OptState, before: optax.OptState, of: Params, step: jax.Array
) -> optax.OptState:
    """Return a state with the dtypes of the one `before`.

    Args:
      of: the source of each parameter.
      step: int32 scalar, finished steps.
    """
    numbers = Counter[Source]()

    def store(old: jax.Array, new: jax.Array, source: Source) -> jax.Array:
        if old.dtype != jnp.bfloat16:
            return new
        numbers[source] += 1  # each moment of a parameter has its own bits
        return to_bfloat16(new, source.draw(step, numbers[source], new.shape))

    no_parameter = Source(0, np.zeros((), np.int32))
    by_leaf = map_by_parameter(lambda leaf, source: source, before, of, no_parameter)
    return jax.tree.map(store, before, state, by_leaf)


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Round finite float32 to one of the two nearest bfloat16, up with the share of what is cut.

    bfloat16 is the upper half of float32, so a uniform uint16, added to the lower half, carries
    over with just that probability.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((word >> 16).astype(jnp.uint16), jnp.bfloat16)
