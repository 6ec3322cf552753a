"""Mark where a traced program is cut into chunks, by identities that survive transformations."""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import jax
from jax.core import AbstractValue
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")
Tangent: TypeAlias = jax.Array | ad.Zero

FORWARD, TANGENT, BACKWARD = "forward", "tangent", "backward"

# Identity on any number of arrays; `phase` distinguishes the program's own marks from derived ones.
# Marks of arrays that depend on what the program is differentiated for have `has_tangents=True`.
mark_p = Primitive("stage_boundary")
mark_p.multiple_results = True


def mark_stage_boundary(x: T) -> T:
    """Return `x`, and mark that what precedes it is one chunk and what follows it the next.

    A model of G chunks has G marks, one at the end of each. The last is between the last layer and
    the loss, so that the backward of the last chunk has a beginning. Chunks have the order in which
    Python calls the marks. What one chunk computes and a later one reads need not pass through the
    mark: it is sent along, as are skip connections past several stages.

    `jax.grad`, `jax.vmap` and `jax.jit` around a mark keep it. Differentiation leaves a backward
    mark on the cotangents, so that the gradient of a program is cut where the program is. But
    `lax.scan`, `lax.fori_loop`, `lax.while_loop`, `lax.cond` and `jax.checkpoint` run on one stage
    as a whole: between two marks they may contain anything but a mark. A mark inside of them, one
    whose result is not used, and one that no gradient passes through are refused when the program
    is sliced; too few or too many marks, when the program meets the table. Of two marks with
    nothing in between, the second ends a chunk without work.

    Args:
      x: what the next chunk receives: a pytree of arrays, of which at least one has a gradient.

    Raises:
      ValueError: there is no array.
    """
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        raise ValueError("a stage mark needs an array; write x = mark_stage_boundary(x)")
    return jax.tree.unflatten(tree, mark_p.bind(*leaves, phase=FORWARD))


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, phase: str, **_: bool
) -> tuple[list[jax.Array], list[Tangent | None]]:
    outputs = mark_p.bind(*primals, phase=phase, has_tangents=True)
    # A mark of tangents that is differentiated again keeps its phase.
    return outputs, _mark_nonzero(tangents, TANGENT if phase == FORWARD else phase)


def _transpose(
    cotangents: Sequence[Tangent], *operands: jax.Array | ad.UndefinedPrimal, **_: str | bool
) -> list[Tangent | None]:
    # Only linear operands have a cotangent; the others were known before.
    linear = [
        cotangent if ad.is_undefined_primal(operand) else None
        for cotangent, operand in zip(cotangents, operands, strict=True)
    ]
    return [
        None if type(cotangent) is ad.Zero else cotangent
        for cotangent in _mark_nonzero(linear, BACKWARD)
    ]


def _mark_nonzero(tangents: Sequence[Tangent | None], phase: str) -> list[Tangent | None]:
    """Mark the arrays among tangents or cotangents; symbolic zeros stay as they are."""
    marked = list(tangents)
    arrays = [i for i, t in enumerate(tangents) if t is not None and type(t) is not ad.Zero]
    if arrays:
        results = mark_p.bind(*(tangents[i] for i in arrays), phase=phase)
        for i, result in zip(arrays, results, strict=True):
            marked[i] = result
    return marked


def _batch(
    arrays: Sequence[jax.Array], dims: Sequence[int], **params: str | bool
) -> tuple[list[jax.Array], Sequence[int]]:
    return mark_p.bind(*arrays, **params), dims


def _abstract(*avals: AbstractValue, **_: str | bool) -> list[AbstractValue]:
    return list(avals)


# A mark computes nothing, however it is run: eagerly, abstractly, batched or compiled.
mark_p.def_impl(lambda *args, **_: list(args))
mark_p.def_abstract_eval(_abstract)
ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda ctx, *args, **_: args)
