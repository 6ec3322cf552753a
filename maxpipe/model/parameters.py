"""Parameters as data: shape, dtype, logical axes and initial distribution, declared once beside the layer.

NNX modules declare parameters; `split_module` turns a module into a pure function over a plain
nested dict and a dict of `ParamSpec`s of the same structure. Shardings and initial values are both
derived from the specs.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Params = Any  # nested dict of arrays


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape, dtype: of the parameter of one layer.
      axes: logical axis of each dimension.
      stddev: standard deviation of the initial normal values; 0 with `fill` gives a constant.
      fill: constant added to the initial values.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    stddev: float
    fill: float = 0.0

    def init(self, key: jax.Array) -> jax.Array:
        """Initial values, float32 draws cast to `dtype`."""
        values = jnp.full(self.shape, self.fill, jnp.float32)
        if self.stddev:
            values += self.stddev * jax.random.normal(key, self.shape, jnp.float32)
        return values.astype(self.dtype)


def declare(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: Any,
    *,
    stddev: float = 0.0,
    fill: float = 0.0,
) -> nnx.Param:
    """Declares a parameter inside an NNX module; see `ParamSpec` for the arguments."""
    spec = ParamSpec(shape, jnp.dtype(dtype), axes, stddev, fill)
    return nnx.Param(jnp.zeros(shape, dtype), spec=spec)


def split_module(make: Callable[[], nnx.Module]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Turns an NNX module into a pure function.

    Args:
      make: builds the module; called under `nnx.eval_shape`, so nothing is allocated.

    Returns:
      (apply, specs): `apply(params, *args, method=None, **kwargs)` calls the module (or a method of
      it) with `params`, a nested dict with the structure of `specs`.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    variables, _ = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    treedef = jax.tree.structure(state)
    spec_dict = nnx.to_pure_dict(state)
    specs = jax.tree.unflatten(
        jax.tree.structure(spec_dict), [v.get_metadata()["spec"] for v in variables]
    )

    def apply(params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(treedef, jax.tree.leaves(params)))
        return getattr(module, method or "__call__")(*args, **kwargs)

    return apply, specs


def map_specs(f: Callable[..., Any], specs: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a tree of `ParamSpec`s."""
    return jax.tree.map(f, specs, *rest, is_leaf=lambda x: isinstance(x, ParamSpec))


def path_key(key: jax.Array, path: tuple[Any, ...]) -> jax.Array:
    """A key that depends on the parameter's path only, so that initial values do not depend on tree order."""
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


def init_params(specs: Any, key: jax.Array) -> Params:
    """Initial values for a tree of specs, each leaf from (key, path)."""

    def init(path: tuple[Any, ...], spec: ParamSpec) -> jax.Array:
        return spec.init(path_key(key, path))

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def init_layers(specs: Any, key: jax.Array, layer_index: jax.Array) -> Params:
    """Initial values of many layers, each leaf from (key, path, layer index).

    Args:
      specs: specs of one layer.
      key: PRNG key of the run.
      layer_index: int32 [...], indices of the layers in model order, in any arrangement.

    Returns:
      The tree with leaves [*layer_index.shape, *spec.shape].
    """

    def init(path: tuple[Any, ...], spec: ParamSpec) -> jax.Array:
        leaf_key = path_key(key, path)
        one = lambda index: spec.init(jax.random.fold_in(leaf_key, index))  # noqa: E731
        flat = jax.lax.map(one, layer_index.reshape(-1))
        return flat.reshape(*layer_index.shape, *spec.shape)

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def count(specs: Any) -> int:
    """Number of parameters in a tree of specs."""
    total = 0
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec)):
        size = 1
        for n in spec.shape:
            size *= n
        total += size
    return total
