"""Declare parameters next to their layer: shape, dtype, logical axes and initial distribution.

NNX modules declare parameters; `split_module` turns a module into a pure function over a plain
nested dict and a dict of `ParamSpec`s of the same structure. Shardings and initial values are both
derived from the specs.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

Leaf = TypeVar("Leaf")
TreeT = TypeVar("TreeT")
# Nested dicts by name, {"attention": {"query": leaf, ...}, ...}, with leaves of one type.
Tree: TypeAlias = dict[str, Union[Leaf, "Tree[Leaf]"]]
# A tree of arrays, or of specs or shapes in their place. Leaves are not typed: every access
# of a known path, params["embed"]["embedding"], would need a cast.
Params: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape, dtype: shape and dtype of the parameter in one layer.
      axes: logical axis of each dimension.
      stddev: standard deviation of the initial normal values; 0 with `fill` gives a constant.
      fill: constant added to the initial values.
      keeps_dtype: whether computations use it in `dtype`, not in the dtype of activations.
      frozen: whether training leaves it unchanged: it has no gradient and no optimizer state.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]
    stddev: float
    fill: float = 0.0
    keeps_dtype: bool = False
    frozen: bool = False

    def compute_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return the dtype in which the parameter is used if activations have `dtype`."""
        return self.dtype if self.keeps_dtype else dtype

    def init(self, key: jax.Array) -> jax.Array:
        """Draw initial values in float32 and cast them to `dtype`."""
        values = jnp.full(self.shape, self.fill, jnp.float32)
        if self.stddev:
            values += self.stddev * jax.random.normal(key, self.shape, jnp.float32)
        return values.astype(self.dtype)


def declare(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: DTypeLike,
    *,
    stddev: float = 0.0,
    fill: float = 0.0,
    keeps_dtype: bool = False,
) -> nnx.Param:
    """Declare a parameter inside an NNX module; see `ParamSpec` for the arguments."""
    spec = ParamSpec(shape, jnp.dtype(dtype), axes, stddev, fill, keeps_dtype)
    return nnx.Param(jnp.zeros(shape, dtype), spec=spec)


def split_module(make: Callable[[], nnx.Module]) -> tuple[Callable[..., Any], Params]:
    """Turn an NNX module into a pure function.

    Args:
      make: function that builds the module; called under `nnx.eval_shape`, so nothing is allocated.

    Returns:
      (apply, specs): `apply(params, *args, method=None, **kwargs)` calls the module (or a method of
      it) with `params`, a nested dict with the structure of `specs`.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    variables, _ = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    treedef = jax.tree.structure(state)
    spec_dict = nnx.to_pure_dict(state)
    leaves = [v.get_metadata()["spec"] for v in variables]
    specs = jax.tree.unflatten(jax.tree.structure(spec_dict), leaves)

    def apply(params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(treedef, jax.tree.leaves(params)))
        return getattr(module, method or "__call__")(*args, **kwargs)

    return apply, specs


def map_specs(f: Callable[..., Leaf], specs: Params, *trees: Params) -> Tree[Leaf]:
    """Apply `f(spec, *leaves)` to every parameter, as `jax.tree.map` does."""
    return jax.tree.map(f, specs, *trees, is_leaf=_is_spec)


def trainable(specs: Params, tree: Params) -> Params:
    """Return a tree like the specs with None, no leaf at all, in place of frozen parameters.

    Without frozen parameters this is the tree itself.
    """
    return map_specs(lambda spec, leaf: None if spec.frozen else leaf, specs, tree)


def has_frozen(specs: Params) -> bool:
    """Return whether any parameter is frozen."""
    return any(spec.frozen for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def with_trainable(params: TreeT, moving: TreeT) -> TreeT:
    """Return `params` with the leaves of `moving`, from `trainable`, in their places."""
    return jax.tree.map(lambda p, m: p if m is None else m, params, moving)


def init_params(specs: Params, key: jax.Array) -> Params:
    """Draw initial values for a tree of specs, each leaf from (key, path)."""

    def init(path: KeyPath, spec: ParamSpec) -> jax.Array:
        return _values(spec, _keys(key, _number_of(path), None))

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=_is_spec)


def init_layers(specs: Params, key: jax.Array, layer_index: jax.Array) -> Params:
    """Draw initial values of many layers, each leaf from (key, path, layer index).

    Args:
      specs: specs of one layer.
      key: PRNG key of the run.
      layer_index: int32 [...], indices of the layers in model order, in any arrangement.

    Returns:
      The tree with leaves [*layer_index.shape, *spec.shape].
    """

    def init(path: KeyPath, spec: ParamSpec) -> jax.Array:
        return _values(spec, _keys(key, _number_of(path), layer_index))

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=_is_spec)


def draw(
    specs: Params, shardings: Params, key: jax.Array, layer_index: jax.Array | None = None
) -> Params:
    """Return what `init_params` returns, or `init_layers` with `layer_index`, laid out on devices.

    Parameters that differ in their place alone share a program, in all calls of a process.
    """

    def draw_leaf(path: KeyPath, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        plain = replace(spec, axes=(), keeps_dtype=False, frozen=False)
        return _drawing(plain, sharding)(_keys(key, _number_of(path), layer_index))

    return jax.tree_util.tree_map_with_path(draw_leaf, specs, shardings, is_leaf=_is_spec)


@cache
def _drawing(spec: ParamSpec, sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(partial(_values, spec), out_shardings=sharding)


@jax.jit
def _keys(key: jax.Array, number: np.uint32, layer_index: jax.Array | None) -> jax.Array:
    """Return a parameter's key, from the number of its path, or one for each of `layer_index`."""
    leaf_key = jax.random.fold_in(key, number)
    if layer_index is None:
        return leaf_key
    fold = partial(jax.random.fold_in, leaf_key)
    return jax.lax.map(fold, layer_index.reshape(-1)).reshape(layer_index.shape)


def _values(spec: ParamSpec, keys: jax.Array) -> jax.Array:
    """Draw one parameter's values [*keys.shape, *spec.shape], of a layer from each key."""
    return jax.lax.map(spec.init, keys.reshape(-1)).reshape(*keys.shape, *spec.shape)


_OUTER_AXES = dict.fromkeys(("embed", "expert_embed", "latent"), "outer_embed")


def outer_axes(spec: ParamSpec) -> tuple[str, ...]:
    """Return the logical axes of a layer's parameter that is split like embedding and head."""
    return tuple(_OUTER_AXES.get(axis, axis) for axis in spec.axes)


def count(specs: Params) -> int:
    """Return the number of parameters in a tree of specs."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def _is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)


def _number_of(path: KeyPath) -> np.uint32:
    """Return a number that depends on the path alone, so that tree order does not matter."""
    return np.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))
