"""Run GPipe inside your own `jax.shard_map`, for models that maxpipe does not train.

Every device along a mesh axis is a stage and calls its own module on what the previous stage sent
it (Huang et al. 2019). The functions take plain callables, Flax NNX modules, and Flax Linen modules
bound inside another module.

Random numbers, such as dropout masks, differ by microbatch and by stage: both are folded into the
keys of a bound Linen module or an NNX module. Other state (batch statistics, sown values) can be
read by stages; changes to it are refused, since no device could return the change.

Letters: S stages (the size of the mesh axis), M microbatches, B sequences of a device's batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.core.scope import CollectionFilter
from jax import lax

Stage = Callable[..., Any]  # (x, *args, **kwargs) -> an array like x
# (microbatch, x, *args, **kwargs) -> an array like x; the microbatch selects random numbers.
PureStage = Callable[..., Any]

_STATE_CHANGES = (
    "a stage cannot change its own state, since it runs once per microbatch on one device; {}. "
    "Use a layer without running statistics, such as LayerNorm, or read them only "
    "(BatchNorm with use_running_average=True), and sow nothing that is mutable"
)


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
        Its random numbers are as in any call: fold iteration and stage into its keys.
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
    input = jnp.asarray(input)
    result = module(jnp.where(index == 0, input, state), *args, **kwargs)
    _check_result(result, input)
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
        like the microbatch. A Linen module must be bound, with `rngs` if it draws random numbers. A
        plain function cannot tell microbatches apart: with a key of its own all share a mask.
      x: batch [B, ...] for the first stage; B is a multiple of M. The other stages use its shape,
        and compute on it while they wait; those results are dropped.
      *args, **kwargs: passed to the module for every microbatch.
      model_axis_name: mesh axis of the stages.

    Returns:
      [B, ...]: the last stage's result there and zeros elsewhere, so that a sum over the axis gives
      every device the result.

    Raises:
      ValueError: the call is not inside a `shard_map` over that axis, M does not divide B, the
        module's result is not like its input, or the module would change its own
        state.

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
    index, _ = _stage(model_axis_name)
    micro = _microbatches(x, num_microbatches)
    with jax.named_scope("pipeline"):
        stage = _pure(module, micro[0], index, args, kwargs)
        outputs = _run(stage, micro, model_axis_name, args, kwargs)
    return outputs.reshape(jnp.shape(x))  # [M, B / M, ...] -> [B, ...]


def _microbatches(x: jax.Array, num_microbatches: int) -> jax.Array:
    x = jnp.asarray(x)  # [B, ...]
    rows = x.shape[0] if x.ndim else 0
    if num_microbatches < 1 or not rows or rows % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide the batch's rows, {rows} here"
        )
    return x.reshape(num_microbatches, rows // num_microbatches, *x.shape[1:])  # [M, B / M, ...]


def _run(
    stage: PureStage,
    micro: jax.Array,
    model_axis_name: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> jax.Array:
    """Run microbatches [M, B / M, ...] through the stages; return the last stage's results."""
    index, size = _stage(model_axis_name)
    num_microbatches = micro.shape[0]

    def iterate(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        entering = micro[jnp.clip(t, 0, num_microbatches - 1)]
        # A stage that waits computes on real rows: at zeros a module's derivative may be infinite.
        waits = (t < index) | (t >= index + num_microbatches)
        microbatch = jnp.clip(t - index, 0, num_microbatches - 1)
        return execute_pipeline_step(
            lambda x: stage(microbatch, x, *args, **kwargs),
            jnp.where(waits, entering, state),
            entering,
            model_axis_name=model_axis_name,
        )

    first = _varying_like(iterate, micro[0])
    _, outputs = lax.scan(iterate, first, jnp.arange(num_microbatches + size - 1))
    return outputs[size - 1 :]


class PipelineModule(nn.Module):
    """A Linen module whose stages are `module_fn()`, one on each device along a mesh axis.

    Initialise and apply it inside `jax.shard_map`, with any `rngs` that the stages need. Its
    variables have a leading dimension of 1 there, so that `PartitionSpec(model_axis_name)` stacks
    the stages' variables; `nn.Partitioned` names get that axis in front. Each stage draws its own
    initial values. The variables are stored under the name that Linen gives a stage, such as
    `Dense_0`: the same tree that xlstm-jax's `PipelineModule` has within its
    `ModelParallelismWrapper`.

    Attributes:
      model_axis_name: mesh axis of the stages.
      module_fn: function that builds a stage, a Linen module from [B / M, ...] to an array like it.

    `__call__` takes and returns what `execute_pipeline` does, and raises the same errors.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from flax import linen as nn
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()[:4]), ("pipe",))
      >>> model = PipelineModule("pipe", num_microbatches=2, module_fn=lambda: nn.Dense(8))
      >>> shard_map = lambda f, *i, out: jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=out)
      >>> x = jnp.ones((6, 8))
      >>> params = shard_map(model.init, P(), P(), out=P("pipe"))(jax.random.key(0), x)
      >>> params["params"]["Dense_0"]["kernel"].shape
      (4, 8, 8)
      >>> forward = lambda p, x: jax.lax.psum(model.apply(p, x), "pipe")
      >>> y = shard_map(forward, P("pipe"), P(), out=P())(params, x)
      >>> y.shape
      (6, 8)
    """

    model_axis_name: str
    num_microbatches: int
    module_fn: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        index, _ = _stage(self.model_axis_name)
        stage = self.module_fn().clone(parent=None)
        name, axis = f"{type(stage).__name__}_0", self.model_axis_name
        assert self.scope is not None
        keys = {stream: self.make_rng(stream) for stream in self.scope.rngs}
        is_initializing = self.is_initializing()
        if is_initializing:
            micro = _microbatches(x, self.num_microbatches)[0]
            own_keys = {stream: jax.random.fold_in(key, index) for stream, key in keys.items()}
            # Linen has keyword arguments of its own, which may be called like those of the stage.
            method = _with_keywords(kwargs)
            for collection, values in stage.init(own_keys, micro, *args, method=method).items():
                self.put_variable(collection, name, _stacked(values, axis))
        variables = {
            collection: _unstacked(values[name], axis)
            for collection, values in self.variables.items()
            if name in values
        }
        bound = stage.bind(
            variables,
            rngs={stream: key for stream, key in keys.items() if stream != "params"},
            mutable=False if is_initializing else self.scope.mutable,
        )
        return execute_pipeline(
            bound,
            x,
            *args,
            num_microbatches=self.num_microbatches,
            model_axis_name=axis,
            **kwargs,
        )


def _stage(axis: str) -> tuple[jax.Array, int]:
    try:
        return lax.axis_index(axis), lax.axis_size(axis)
    except NameError:
        message = f"model_axis_name={axis!r} is not an axis of a jax.shard_map around this call"
        raise ValueError(f"{message}; call it inside one whose mesh has that axis") from None


def _pure(
    module: Stage,
    x: jax.Array,
    index: jax.Array,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> PureStage:
    """Return `module` as a function without state of its own, which a loop can call."""
    if isinstance(module, nnx.Module):
        return _pure_nnx(module, index)
    if isinstance(module, nn.Module):
        return _pure_linen(module, x, index, args, kwargs)
    # Keyword arguments may be called like parameters of any function here.
    return lambda microbatch, /, *args, **kwargs: module(*args, **kwargs)


def _with_keywords(kwargs: dict[str, Any]) -> Callable[..., Any]:
    return lambda module, *args: module(*args, **kwargs)


def _pure_linen(
    module: nn.Module,
    x: jax.Array,
    index: jax.Array,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> PureStage:
    if module.scope is None:
        message = "a Linen module must be bound: use it inside another module"
        raise ValueError(f"{message}, module.bind, or PipelineModule")
    mutable = module.scope.mutable
    if module.is_initializing():
        module(x, *args, **kwargs)
        mutable = False
    unbound, variables = module.unbind()
    # Within a parent each call draws a key. A module from `bind` keeps its keys, so that tracing
    # the same function twice gives the same masks.
    draws = module.scope.parent is not None
    keys = {
        stream: module.make_rng(stream) if draws else rng.as_jax_rng()
        for stream, rng in module.scope.rngs.items()
        if stream != "params"
    }

    def apply(
        mutable: CollectionFilter, microbatch: jax.Array, /, *args: Any, **kwargs: Any
    ) -> Any:
        rngs = {stream: _folded(key, microbatch, index) for stream, key in keys.items()}
        method = _with_keywords(kwargs)
        return unbound.apply(variables, *args, rngs=rngs, mutable=mutable, method=method)

    trial = partial(apply, mutable or [], jnp.int32(0))
    try:
        _, changed = jax.eval_shape(lambda x: trial(x, *args, **kwargs), x)
    except flax.errors.ModifyScopeVariableError as error:
        raise ValueError(_STATE_CHANGES.format(f"{type(module).__name__} does: {error}")) from None
    lost = sorted(name for name in changed if name != "params" and jax.tree.leaves(changed[name]))
    if lost:
        where = f"{type(module).__name__} writes {', '.join(lost)}, which are mutable in this call"
        raise ValueError(_STATE_CHANGES.format(where))
    return partial(apply, False)


def _pure_nnx(module: nnx.Module, index: jax.Array) -> PureStage:
    graph, *states = nnx.split(module, nnx.RngState, ...)
    rng_state, other_state = states
    # One draw is counted for every stream, so that the next call differs. A module from outside the
    # traced function cannot be changed, and keeps its counts.
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.RngCount) and variable._can_update:
            variable[...] += 1

    def stage(microbatch: jax.Array, /, *args: object, **kwargs: object) -> jax.Array:
        def fold(variable: nnx.Variable) -> nnx.Variable:
            if not isinstance(variable, nnx.RngKey):
                return variable
            return variable.replace(_folded(variable[...], microbatch, index))

        keys = jax.tree.map(fold, rng_state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        copy = nnx.merge(graph, keys, other_state, copy=True)
        before = jax.tree.leaves(nnx.state(copy, nnx.Not(nnx.RngState)))
        result = copy(*args, **kwargs)
        after = jax.tree.leaves(nnx.state(copy, nnx.Not(nnx.RngState)))
        if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
            raise ValueError(_STATE_CHANGES.format(f"{type(module).__name__} does"))
        return result

    return stage


def _folded(key: jax.Array, microbatch: jax.Array, stage: jax.Array) -> jax.Array:
    def fold(key: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, microbatch), stage)

    for _ in range(key.ndim if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.ndim - 1):
        fold = jax.vmap(fold)
    return fold(key)


def _stacked(tree: Any, axis: str) -> Any:
    """Add a leading dimension of 1 to the values of a stage; boxes name it after the mesh axis."""

    def stack(leaf: Any) -> Any:
        if not isinstance(leaf, nn.meta.AxisMetadata):
            return leaf[None]
        return leaf.replace_boxed(_value(leaf)[None]).add_axis(0, {nn.PARTITION_NAME: axis})

    return jax.tree.map(stack, tree, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))


def _unstacked(tree: Any, axis: str) -> Any:
    def unstack(leaf: Any) -> Any:
        if not isinstance(leaf, nn.meta.AxisMetadata):
            return leaf[0]
        return leaf.replace_boxed(_value(leaf)[0]).remove_axis(0, {nn.PARTITION_NAME: axis})

    return jax.tree.map(unstack, tree, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))


def _value(box: nn.meta.AxisMetadata) -> Any:
    # `Partitioned.unbox` would constrain the value to axes that are manual here.
    return box.value if isinstance(box, nn.Partitioned) else box.unbox()


def _check_result(result: object, x: jax.Array) -> None:
    # The result itself: a stateful module cannot be called once more, within a trace of the call.
    got = jax.eval_shape(lambda result: result, result)
    if getattr(got, "shape", None) != x.shape or getattr(got, "dtype", None) != x.dtype:
        raise ValueError(
            f"a stage must return an array like its input, {x.shape} {x.dtype}, since it is the "
            f"next one's input; got {got}"
        )


def _varying_like(iterate: Callable[..., object], x: jax.Array) -> jax.Array:
    """Return the first state: zeros that vary over the same mesh axes as later states."""
    zeros = jnp.zeros_like(x)
    while True:
        state = jax.make_jaxpr(iterate)(zeros, jnp.int32(0)).out_avals[0]
        missing = tuple(state.manual_axis_type.varying - jax.typeof(zeros).manual_axis_type.varying)
        if not missing:
            return zeros
        zeros = lax.pcast(zeros, missing, to="varying")
