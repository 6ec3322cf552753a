"""Optimizers, chosen by `optimizer.name`; the facts about them are in `maxpipe.config.catalog.OPTIMIZERS`.

Each maps `optimizer.*` and the tree of `ParamSpec`s to an `optax.GradientTransformation` whose
updates are descent directions: they are multiplied by minus the learning rate, after weight decay
was added. Gradients, and the parameters given to `init`, are float32. Layer parameters have leading
layer dimensions that their specs do not have, one to three of them, as the engine likes: what is no
elementwise function must go through `per_layer`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.parameters import Params, ParamSpec

LEAST_FACTORED = 128  # adafactor keeps all second moments of smaller matrices
RMS_OF_ADAMW = 0.2
MUON_MOMENTUM = 0.95


def adamw(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019)."""
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


def lion(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023): the sign of a momentum; takes a third to a tenth of AdamW's learning rate."""
    return optax.scale_by_lion(config.beta1, config.beta2)


def sgd(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum beta1; beta1 = 0 keeps no state."""
    return optax.trace(config.beta1) if config.beta1 else optax.identity()


def adafactor(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018): second moments of a matrix as one row and one column.

    Updates are clipped to a root mean square of 1 and scaled by that of the parameter, so that
    learning rates are relative to the size of parameters: 1e-2 is usual. No first moment; the decay
    of the second grows with the steps.
    """

    def make(spec: ParamSpec) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_factored_rms(min_dim_size_to_factor=LEAST_FACTORED),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        )

    return per_layer(make, specs)


def muon(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    """Muon (Jordan 2024): the momentum of each matrix made orthogonal; AdamW for embeddings, head, norms and biases.

    Updates of matrices have the root mean square of AdamW's, so that both share learning rate and
    weight decay (Liu et al. 2025, "Muon is Scalable for LLM Training").
    """

    def make(spec: ParamSpec) -> optax.GradientTransformation:
        dimensions = matrix_dimensions(spec)
        if dimensions is None:
            return optax.scale_by_adam(config.beta1, config.beta2, config.eps)
        sides = (math.prod(spec.shape[i] for i in axes) for axes in dimensions)
        return optax.chain(
            scale_by_muon(
                beta=MUON_MOMENTUM, weight_dimension_numbers=MuonDimensionNumbers(*dimensions)
            ),
            # An orthogonal matrix of sides m <= n has the root mean square 1 / sqrt(n).
            optax.scale(RMS_OF_ADAMW * math.sqrt(max(sides))),
        )

    return per_layer(make, specs)


def matrix_dimensions(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Dimensions of a layer's parameter over which it sums and which it gives out; None if it is no matrix.

    A matrix leads from the residual stream or back to it: `embed` is one side, the other dimensions
    are the other. Experts are matrices by themselves.
    """
    sides = [i for i, axis in enumerate(spec.axes) if axis != "expert"]
    if "embed" not in spec.axes or len(sides) < 2:
        return None
    embed = spec.axes.index("embed")
    others = tuple(i for i in sides if i != embed)
    return ((embed,), others) if embed == sides[0] else (others, (embed,))


def per_layer(
    make: Callable[[ParamSpec], optax.GradientTransformation], specs: Any
) -> optax.GradientTransformation:
    """A transformation of the whole tree in which one layer knows nothing of the others.

    Args:
      make: the transformation of one parameter of one layer, an array of its spec's shape.
      specs: tree of `ParamSpec`s.

    Returns:
      A transformation whose state is a tree like the parameters that has for each leaf the state of
      its transformation. Every array in there has the leading layer dimensions of the parameter,
      counters as well, so that it follows the parameter into the layout on disk.
    """
    treedef: Any = jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    all_specs = treedef.flatten_up_to(specs)
    transforms = [make(spec) for spec in all_specs]

    def over_layers(f: Callable[..., Any], spec: ParamSpec, p: jax.Array) -> Callable[..., Any]:
        # One by one: merged into a single dimension, they would have to be gathered from the other
        # stages first.
        for _ in range(p.ndim - len(spec.shape)):
            f = jax.vmap(f)
        return f

    def init(params: Params) -> Any:
        leaves = zip(transforms, all_specs, treedef.flatten_up_to(params), strict=True)
        return jax.tree.unflatten(
            treedef, [over_layers(t.init, spec, p)(p) for t, spec, p in leaves]
        )

    def update(gradients: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        trees = (treedef.flatten_up_to(tree) for tree in (gradients, state, params))
        results = [
            over_layers(t.update, spec, p)(g, s, p.astype(jnp.float32))
            for t, spec, g, s, p in zip(transforms, all_specs, *trees, strict=True)
        ]
        directions, states = zip(*results, strict=True)
        return jax.tree.unflatten(treedef, directions), jax.tree.unflatten(treedef, states)

    return optax.GradientTransformation(init, update)
