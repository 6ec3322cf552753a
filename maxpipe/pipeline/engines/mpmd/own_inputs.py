"""Describe the arguments and results of a user's function: names, shapes, layouts, gradients.

Letters: M microbatches, B rows of a batch.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from maxpipe.pipeline.schedules.table import Table


class Arguments(NamedTuple):
    params: object
    batch: object
    shared: tuple[object, ...]

    def shapes(self) -> "Arguments":
        """Return shapes and dtypes of all arrays.

        Raises:
          ValueError: the call is inside of `jax.jit` or another transformation.
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self)):
            raise ValueError(
                "a pipelined function dispatches to the devices of all stages and cannot be "
                "traced; call it outside of jax.jit, jax.grad and jax.vmap"
            )
        shapes: Arguments = jax.tree.map(_shape, self)
        return shapes

    def microbatch(self, num_microbatches: int) -> "Arguments":
        """Return the shapes with which the function is called, those of one microbatch.

        Raises:
          ValueError: the batch's arrays do not have the same number of rows, a multiple of M.
        """
        # For each number of rows the first array that has it, for the message.
        rows: dict[int, str] = {}
        for path, x in tree_leaves_with_path(self.batch):
            name = f"batch{keystr(path)}"
            if not x.shape:
                raise ValueError(
                    f"{name} is a scalar and cannot be divided into microbatches; pass it after "
                    f"the batch, as an argument that all share"
                )
            rows.setdefault(x.shape[0], name)
            if x.shape[0] % num_microbatches:
                raise ValueError(
                    f"{name} has {x.shape[0]} rows, which {num_microbatches} microbatches do not "
                    f"divide; choose another batch size or table"
                )
        if len(rows) > 1:
            listed = ", ".join(f"{name} has {count}" for count, name in rows.items())
            raise ValueError(
                f"arrays of the batch differ in rows: {listed}; pass what is no row of the batch "
                f"after it, as an argument that all microbatches share"
            )
        # [B, ...] -> [B / M, ...]
        micro = jax.tree.map(
            lambda x: x.update(shape=(x.shape[0] // num_microbatches, *x.shape[1:])), self.batch
        )
        return self._replace(batch=micro)


def _shape(x: object) -> jax.ShapeDtypeStruct:
    """Return shape and dtype that JAX gives an argument; a traced program has no layouts yet."""
    # NumPy arrays and Python numbers get the dtype that JAX would give them; the dtype of a number
    # is weak, so that it does not change that of an array with which it is multiplied.
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class Settings(NamedTuple):
    """What `pipelined` was given.

    Attributes:
      table: the schedule.
      meshes: the meshes of the stages, with automatic axes.
      param_specs, batch_specs: layouts, as prefixes of the trees of arrays.
      is_mean: whether results are averaged over microbatches instead of added up.
    """

    table: Table
    meshes: tuple[Mesh, ...]
    param_specs: object
    batch_specs: object
    is_mean: bool


class Input(NamedTuple):
    """One input of the function, an array.

    Attributes:
      name: the input's name, for messages.
      shape: shape and dtype with which the function is called.
      spec: layout on each stage.
      kind: "param", "batch", "key" (a PRNG key that all microbatches share) or "shared".
    """

    name: str
    shape: jax.ShapeDtypeStruct
    spec: PartitionSpec
    kind: str

    @property
    def varies(self) -> bool:
        return self.kind in ("batch", "key")


def inputs(arguments: Arguments, settings: Settings) -> list[Input]:
    """Return the inputs, in the order of the traced program.

    Args:
      arguments: shapes with which the function is called.
      settings: what `pipelined` was given.
    """
    entries = [
        Input(f"params{keystr(path)}", x, spec, "param")
        for (path, x), spec in zip(
            tree_leaves_with_path(arguments.params),
            _specs("param_specs", settings.param_specs, arguments.params),
            strict=True,
        )
    ]
    entries += [
        Input(f"batch{keystr(path)}", x, spec, "batch")
        for (path, x), spec in zip(
            tree_leaves_with_path(arguments.batch),
            _specs("batch_specs", settings.batch_specs, arguments.batch),
            strict=True,
        )
    ]
    # Nothing says how further arguments may be split: each device has them whole.
    for path, x in tree_leaves_with_path(arguments.shared):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        name = f"further argument {keystr(path)}"
        if x.dtype == jnp.uint32 and x.shape[-1:] == (2,):  # as of jax.random.PRNGKey
            warnings.warn(
                f"{name} looks like a key of jax.random.PRNGKey, with which all microbatches draw "
                f"the same numbers; pass jax.random.key(seed)",
                stacklevel=2,
            )
        entries.append(Input(name, x, PartitionSpec(), "key" if is_key else "shared"))
    return entries


def _specs(name: str, prefix: object, tree: object) -> list[PartitionSpec]:
    def is_spec(node: object) -> bool:
        return isinstance(node, PartitionSpec)

    try:
        # A spec stands for the subtree below it, as in the shardings that jax.jit takes.
        full = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: spec, part), prefix, tree, is_leaf=is_spec
        )
    except ValueError as error:
        raise ValueError(f"{name} is no prefix of the tree that it describes: {error}") from None
    specs = jax.tree.leaves(full, is_leaf=is_spec)
    for spec in specs:
        if not is_spec(spec):
            raise ValueError(f"{name} has {spec!r}; its leaves must be PartitionSpecs")
    return specs


def check_results(results: object) -> None:
    """Raise ValueError if a result has a dtype that cannot be added up over microbatches.

    Args:
      results: shapes of what the function returns.
    """
    for path, x in tree_leaves_with_path(results):
        if x.dtype == jax.dtypes.float0:  # jax.grad with allow_int
            what = "the gradient of integers, which has no values; pass these after the batch"
        elif jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            what = "a PRNG key, which microbatches cannot be reduced to; leave it out"
        else:
            continue
        raise ValueError(f"result{keystr(path)} of the function is {what}")


def first_gradient(results: object, params: object) -> int:
    """Return the index among the results' leaves at which the gradients of `params` begin.

    Args:
      results: shapes of what the function returns.
      params: shapes of its first argument.

    Raises:
      ValueError: the function does not return such gradients.
    """

    def is_gradient(tree: object) -> bool:
        return _shapes(tree) == _shapes(params)

    if isinstance(results, tuple) and len(results) == 2:
        # If both look like the parameters, the function is taken for value_and_grad.
        if is_gradient(results[1]):  # jax.value_and_grad
            return len(jax.tree.leaves(results[0]))
        if is_gradient(results[0]):  # jax.grad with has_aux
            return 0
    if is_gradient(results):  # jax.grad
        return 0
    raise ValueError(
        "the function must return (value, gradients) with gradients like its first argument; "
        "pass jax.value_and_grad(loss), without argnums"
    )


def _shapes(tree: object) -> tuple[object, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]
