"""Optimizers of single parameters, applied to each layer's by itself, however layers are stacked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxpipe.model.parameters import Params, ParamSpec


def per_layer(make: Callable[[ParamSpec], optax.GradientTransformation], specs: Any) -> optax.GradientTransformation:
    """A transformation of the whole tree in which one layer knows nothing of the others.

    Args:
      make: the transformation of one parameter of one layer, an array of its spec's shape.
      specs: tree of `ParamSpec`s.

    Returns:
      A transformation whose state is a tree like the parameters that has for each leaf the state of its
      transformation. Every array in there has the leading layer dimensions of the parameter, counters as well, so that
      it follows the parameter into the layout on disk.
    """
    treedef: Any = jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    all_specs = treedef.flatten_up_to(specs)
    transforms = [make(spec) for spec in all_specs]

    def over_layers(f: Callable[..., Any], spec: ParamSpec, p: jax.Array) -> Callable[..., Any]:
        # One by one: merged into a single dimension, they would have to be gathered from the other stages first.
        for _ in range(p.ndim - len(spec.shape)):
            f = jax.vmap(f)
        return f

    def init(params: Params) -> Any:
        leaves = zip(transforms, all_specs, treedef.flatten_up_to(params), strict=True)
        return jax.tree.unflatten(treedef, [over_layers(t.init, spec, p)(p) for t, spec, p in leaves])

    def update(gradients: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        trees = (treedef.flatten_up_to(tree) for tree in (gradients, state, params))
        results = [
            over_layers(t.update, spec, p)(g, s, p.astype(jnp.float32))
            for t, spec, g, s, p in zip(transforms, all_specs, *trees, strict=True)
        ]
        directions, states = zip(*results, strict=True)
        return jax.tree.unflatten(treedef, directions), jax.tree.unflatten(treedef, states)

    return optax.GradientTransformation(init, update)
