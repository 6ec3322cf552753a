"""Run GPipe inside your own `jax.shard_map`, for models that maxpipe does not train.

Every device along a mesh axis is a stage and calls its own module on what the previous stage sent
it (Huang et al. 2019). The functions take plain callables, Flax NNX modules, and Flax Linen modules
bound inside another module.

Letters: S stages (the size of the mesh axis), M microbatches, B sequences of a device's batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

Stage = Callable[..., Any]  # (x, *args, **kwargs) -> an array like x


def execute_pipeline_step(
    module: Stage,
    state: jax.Array,
    input: jax.Array,
    *args: Any,
    model_axis_name: str,
    **kwargs: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run one iteration: every stage computes and passes its result to the next stage.

    Args:
      module: this device's stage; called as module(x, *args, **kwargs), returns an array like x.
      state: what the previous stage sent in the last iteration, [B / M, ...].
      input: the microbatch that enters the first stage, like `state`; the other stages ignore it.
      *args, **kwargs: passed to the module.
      model_axis_name: mesh axis of the stages.

    Returns:
      (state for the next iteration, output): both like `input`; the output is the last stage's
      result there and zeros elsewhere.

    Raises:
      ValueError: the call is not inside a `shard_map` over that axis, or the module's result is not
        like its input.

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",))
      >>> def step(state, x):
      ...     return execute_pipeline_step(lambda y: y + 1, state, x, model_axis_name="pipe")
      >>> run = jax.shard_map(step, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P("pipe"))
      >>> state, output = run(np.array([[0.0], [10.0]]), np.array([[5.0]]))
      >>> state.ravel().tolist(), output.ravel().tolist()  # 5 + 1 is at stage 1; 10 + 1 has left
      ([11.0, 6.0], [0.0, 11.0])
    """
    index, size = _stage(model_axis_name)
    _check_result(module, input, args, kwargs)
    result = module(jnp.where(index == 0, input, state), *args, **kwargs)
    output = jnp.where(index == size - 1, result, 0)
    return lax.ppermute(result, model_axis_name, [(s, (s + 1) % size) for s in range(size)]), output


def execute_pipeline(
    module: Stage,
    x: jax.Array,
    *args: Any,
    num_microbatches: int,
    model_axis_name: str,
    **kwargs: Any,
) -> jax.Array:
    """Run a batch through all stages, in M + S - 1 iterations. Differentiable.

    Args:
      module: this device's stage; called as module(microbatch, *args, **kwargs), returns an array
        like the microbatch. Changes that it makes to its own state (batch statistics) are lost.
      x: batch [B, ...] for the first stage; B is a multiple of M. The other stages use its shape,
        and compute on it while they wait; those results are dropped.
      *args, **kwargs: passed to the module for every microbatch.
      num_microbatches: M.
      model_axis_name: mesh axis of the stages.

    Returns:
      [B, ...]: the last stage's result there and zeros elsewhere, so that a sum over the axis gives
      every device the result.

    Raises:
      ValueError: the call is not inside a `shard_map` over that axis, M does not divide B, or the
        module's result is not like its input.

    Example:
      Two stages, parameters stacked along the axis.

      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()[:2]), ("pipe",))
      >>> def forward(w, x):
      ...     stage = lambda y: y * w[0]
      ...     y = execute_pipeline(stage, x, num_microbatches=2, model_axis_name="pipe")
      ...     return jax.lax.psum(y, "pipe")
      >>> pipeline = jax.shard_map(forward, mesh=mesh, in_specs=(P("pipe"), P()), out_specs=P())
      >>> w = jnp.array([2.0, 5.0])
      >>> pipeline(w, jnp.arange(4.0)).tolist()
      [0.0, 10.0, 20.0, 30.0]
      >>> jax.grad(lambda w: pipeline(w, jnp.arange(4.0)).sum())(w).tolist()  # d(6 w0 w1)
      [30.0, 12.0]
    """
    index, size = _stage(model_axis_name)
    if num_microbatches < 1 or x.shape[0] % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide the batch, which has {x.shape[0]} "
            "rows here"
        )
    micro = x.reshape(num_microbatches, -1, *x.shape[1:])  # [B, ...] -> [M, B / M, ...]
    stage = _pure(module, micro[0], args, kwargs)
    _check_result(stage, micro[0], args, kwargs)

    def iterate(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        entering = micro[jnp.clip(t, 0, num_microbatches - 1)]
        # A stage that waits computes on real rows: at zeros a module's derivative may be infinite.
        waits = (t < index) | (t >= index + num_microbatches)
        return execute_pipeline_step(
            stage,
            jnp.where(waits, entering, state),
            entering,
            *args,
            model_axis_name=model_axis_name,
            **kwargs,
        )

    first = _varying_like(iterate, micro[0])
    _, outputs = lax.scan(iterate, first, jnp.arange(num_microbatches + size - 1))
    return outputs[size - 1 :].reshape(x.shape)


class PipelineModule(nn.Module):
    """A Linen module whose stages are `module_fn()`, one on each device along a mesh axis.

    Initialise and apply it inside `jax.shard_map`. Its parameters have a leading dimension of 1
    there, so that `PartitionSpec(model_axis_name)` stacks the stages' parameters; each stage draws
    its own initial values.

    Attributes:
      module_fn: builds a stage, a Linen module that maps [B / M, ...] to an array like it.
      num_microbatches: M.
      model_axis_name: mesh axis of the stages.

    `__call__` takes and returns what `execute_pipeline` does, and raises the same errors.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from flax import linen as nn
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()[:4]), ("pipe",))
      >>> dense = lambda: nn.Dense(8)
      >>> model = PipelineModule(dense, num_microbatches=2, model_axis_name="pipe")
      >>> shard_map = lambda f, *i, out: jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=out)
      >>> x = jnp.ones((6, 8))
      >>> params = shard_map(model.init, P(), P(), out=P("pipe"))(jax.random.key(0), x)
      >>> params["params"]["stages"]["kernel"].shape
      (4, 8, 8)
      >>> forward = lambda p, x: jax.lax.psum(model.apply(p, x), "pipe")
      >>> y = shard_map(forward, P("pipe"), P(), out=P())(params, x)
      >>> y.shape
      (6, 8)
    """

    module_fn: Callable[[], nn.Module]
    num_microbatches: int
    model_axis_name: str

    @nn.compact
    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        index, _ = _stage(self.model_axis_name)
        module = self.module_fn().clone(parent=None)

        def stages(key: jax.Array) -> dict[str, Any]:
            micro = x[: x.shape[0] // self.num_microbatches]  # [B / M, ...]
            variables = module.init(jax.random.fold_in(key, index), micro, *args, **kwargs)
            return jax.tree.map(lambda p: p[None], variables["params"])

        own_params = jax.tree.map(lambda p: p[0], self.param("stages", stages))
        return execute_pipeline(
            partial(module.apply, {"params": own_params}),
            x,
            *args,
            num_microbatches=self.num_microbatches,
            model_axis_name=self.model_axis_name,
            **kwargs,
        )


def _stage(axis: str) -> tuple[jax.Array, int]:
    """Return (this device's stage, number of stages)."""
    try:
        return lax.axis_index(axis), lax.axis_size(axis)
    except NameError:
        message = f"model_axis_name={axis!r} is not an axis of a jax.shard_map around this call"
        raise ValueError(f"{message}; call it inside one whose mesh has that axis") from None


def _pure(
    module: Stage, x: jax.Array, args: tuple[object, ...], kwargs: dict[str, object]
) -> Stage:
    """Return `module` as a function without state of its own, which a loop can call."""
    if isinstance(module, nnx.Module):
        graph, values = nnx.split(module)
        return lambda *args, **kwargs: nnx.merge(graph, values)(*args, **kwargs)
    if isinstance(module, nn.Module):
        if module.scope is None:
            message = "a Linen module must be bound: use it inside another module"
            raise ValueError(f"{message}, module.bind, or PipelineModule")
        if module.is_initializing():
            module(x, *args, **kwargs)
        unbound, variables = module.unbind()
        rngs = {name: module.make_rng(name) for name in module.scope.rngs if name != "params"}
        return partial(unbound.apply, variables, rngs=rngs)
    return module


def _check_result(
    stage: Stage, x: jax.Array, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    result = jax.eval_shape(lambda x: stage(x, *args, **kwargs), x)
    if not isinstance(result, jax.ShapeDtypeStruct) or (result.shape, result.dtype) != (
        x.shape,
        x.dtype,
    ):
        shape = getattr(result, "shape", type(result).__name__)
        dtype = getattr(result, "dtype", "")
        message = (
            f"a stage must return an array like its input, {x.shape} {x.dtype}, since it is the "
            "next one's input"
        )
        raise ValueError(f"{message}; got {shape} {dtype}".rstrip())


def _varying_like(iterate: Callable[..., object], x: jax.Array) -> jax.Array:
    """Return the first state: zeros that vary over the same mesh axes as later states."""
    zeros = jnp.zeros_like(x)
    while True:
        state = jax.make_jaxpr(iterate)(zeros, jnp.int32(0)).out_avals[0]
        missing = tuple(state.manual_axis_type.varying - jax.typeof(zeros).manual_axis_type.varying)
        if not missing:
            return zeros
        zeros = lax.pcast(zeros, missing, to="varying")
