"""Build optimizers by `optimizer.name`, and learning-rate schedules by `optimizer.schedule`.

The names are in `maxpipe.config.catalog`. An optimizer maps `optimizer.*` and the tree of
`ParamSpec`s to an `optax.GradientTransformation` whose updates are descent directions: `Optimizer`
adds weight decay and multiplies by minus the learning rate. Gradients, and the parameters passed to
`init`, are float32. Layer parameters have one to three leading layer dimensions, depending on the
engine, that their specs do not have: a function that is not elementwise must go through
`per_layer`.

A schedule maps (progress, config) to a share of the peak rate: progress is a float32 scalar that
runs from 0 at the end of the warm-up to 1 at `optimizer.decay_steps` and stays there.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from maxpipe.config.sections import OptimizerConfig
from maxpipe.model.layers import RANK_AXIS
from maxpipe.model.parameters import Params, ParamSpec, map_specs

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

LEAST_FACTORED = 128  # adafactor keeps all second moments of smaller matrices
RMS_OF_ADAMW = 0.2
MUON_MOMENTUM = 0.95
_ENDS = ("embed", "expert_embed", "latent", "outer_embed", RANK_AXIS)  # see `matrix_sides`


def adamw(config: OptimizerConfig, specs: Params) -> optax.GradientTransformation:
    """Build AdamW (Loshchilov & Hutter 2019)."""
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


def lion(config: OptimizerConfig, specs: Params) -> optax.GradientTransformation:
    """Build Lion (Chen et al. 2023): the sign of a momentum.

    Its learning rate is a third to a tenth of AdamW's.
    """
    return optax.scale_by_lion(config.beta1, config.beta2)


def sgd(config: OptimizerConfig, specs: Params) -> optax.GradientTransformation:
    """Build stochastic gradient descent with momentum beta1; beta1 = 0 keeps no state."""
    return optax.trace(config.beta1) if config.beta1 else optax.identity()


def adafactor(config: OptimizerConfig, specs: Params) -> optax.GradientTransformation:
    """Build Adafactor (Shazeer & Stern 2018): second moments of a matrix as one row and one column.

    Updates are clipped to a root mean square of 1 and scaled by the parameter's, so that
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


def muon(config: OptimizerConfig, specs: Params) -> optax.GradientTransformationExtraArgs:
    """Build Muon (Jordan 2024): the momentum of each matrix, orthogonalised.

    Embeddings, head, norms and biases get AdamW. Updates of matrices have the root mean square of
    AdamW's, so that both share learning rate and weight decay (Liu et al. 2025, "Muon is Scalable
    for LLM Training").
    """

    def make(spec: ParamSpec) -> optax.GradientTransformation:
        if matrix_sides(spec) is None:
            return optax.scale_by_adam(config.beta1, config.beta2, config.eps)
        return optax.trace(MUON_MOMENTUM, nesterov=True)

    momenta = per_layer(make, specs)

    def update(
        gradients: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        shardings: Params | None = None,
        **_: object,
    ) -> tuple[Params, optax.OptState]:
        directions, state = momenta.update(gradients, state, params)
        return _orthogonal(specs, directions, shardings), state

    return optax.GradientTransformationExtraArgs(momenta.init, update)


def _orthogonal(specs: Params, directions: Params, shardings: Params | None) -> Params:
    """Orthogonalise the matrices among directions, and scale them as AdamW's."""
    from maxpipe.training.orthogonal import Matrices, orthogonalised  # no other optimizer needs it

    leaves, structure = jax.tree.flatten(directions)
    all_specs = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, ParamSpec))
    at_rest = jax.tree.leaves(shardings) or [None] * len(leaves)
    found = {}
    for i, (spec, sharding) in enumerate(zip(all_specs, at_rest, strict=True)):
        if sides := matrix_sides(spec):
            row, columns = sides
            shape = spec.shape[row], math.prod(spec.shape[j] for j in columns)
            last = tuple(j - len(spec.shape) for j in (row, *columns))
            found[i] = Matrices(shape, last, sharding)
    done = orthogonalised([leaves[i] for i in found], [*found.values()])
    for i, direction in zip(found, done, strict=True):
        # An orthogonal matrix of sides m <= n has the root mean square 1 / sqrt(n).
        leaves[i] = RMS_OF_ADAMW * math.sqrt(max(found[i].shape)) * direction
    return jax.tree.unflatten(structure, leaves)


def matrix_sides(spec: ParamSpec) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension of a parameter's rows and those of its columns; None if it is no matrix.

    A matrix leads from the residual stream or back to it, or from a latent: the dimension `embed`,
    `expert_embed` or `latent`, in the first dense layers `outer_embed`, is one side, all other
    dimensions are the other. In an adapter, the rank may be that one side, too. Each expert is a
    matrix of its own. Embedding and head, which have a dimension `vocab`, are none.
    """
    if "vocab" in spec.axes:
        return None
    sides = [i for i, axis in enumerate(spec.axes) if axis != "expert"]
    ends = [i for i in sides if spec.axes[i] in _ENDS]
    if not ends or len(sides) < 2:
        return None
    return ends[0], tuple(i for i in sides if i != ends[0])


def per_layer(
    make: Callable[[ParamSpec], optax.GradientTransformation], specs: Params
) -> optax.GradientTransformation:
    """Return a transformation of the parameter tree that treats each layer separately.

    Its state is a tree like the parameters, with the state of one transformation, from `make`, in
    place of each. All its arrays, including counters, have the leading layer dimensions of the
    parameter, so that they follow it into the layout on disk.
    """

    def over_layers(f: FunctionT, spec: ParamSpec, p: jax.Array) -> FunctionT:
        # One vmap per layer dimension: merged into a single dimension, the layers would have to be
        # gathered from the other stages first.
        for _ in range(p.ndim - len(spec.shape)):
            f = jax.vmap(f)
        return f

    def init(params: Params) -> optax.OptState:
        def init_one(spec: ParamSpec, p: jax.Array) -> optax.OptState:
            return over_layers(make(spec).init, spec, p)(p)

        return map_specs(init_one, specs, params)

    def update(
        gradients: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        def update_one(
            spec: ParamSpec, g: jax.Array, s: optax.OptState, p: jax.Array
        ) -> tuple[jax.Array, optax.OptState]:
            return over_layers(make(spec).update, spec, p)(g, s, p.astype(jnp.float32))

        assert params is not None, "the transformation of a layer may need its parameters"
        results = map_specs(update_one, specs, gradients, state, params)
        directions = map_specs(lambda spec, result: result[0], specs, results)
        states = map_specs(lambda spec, result: result[1], specs, results)
        return directions, states

    return optax.GradientTransformation(init, update)


def constant(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Keep the peak rate throughout."""
    return jnp.ones_like(progress)


def linear(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Fall in a straight line to the final fraction."""
    return 1 - (1 - config.final_fraction) * progress


def cosine(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Fall along half a cosine to the final fraction (Loshchilov & Hutter 2017)."""
    share = 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return config.final_fraction + (1 - config.final_fraction) * share


def inverse_sqrt(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Fall with the root of the steps (Vaswani et al. 2017), down to the final fraction."""
    warmup = max(config.warmup_steps, 1)
    step = warmup + progress * max(config.decay_steps - config.warmup_steps, 1)
    return jnp.maximum(jnp.sqrt(warmup / step), config.final_fraction)


def wsd(progress: jax.Array, config: OptimizerConfig) -> jax.Array:
    """Keep the peak rate, then fall in a straight line: warm-up, stable, decay (Hu et al. 2024)."""
    decayed = jnp.maximum(progress - config.stable_fraction, 0) / max(
        1 - config.stable_fraction, 1e-6
    )
    return 1 - (1 - config.final_fraction) * decayed
