"""Stage marks: where a traced program is cut into stages."""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

T = TypeVar("T")

FORWARD, TANGENT, BACKWARD = "forward", "tangent", "backward"

# Each mark is an identity on any number of arrays; `phase` tells the program's own marks from
# derived ones.
mark_p = Primitive("stage_boundary")
mark_p.multiple_results = True


def mark_stage_boundary(x: T) -> T:
    """Returns `x`, and marks that what comes before it is one stage and what comes after it the next.

    Survives grad, vmap, jit, `jax.checkpoint` and loops. Differentiation marks the tangents as
    well, and its transpose leaves a backward mark on the cotangents, so that the gradient of a
    program with marks is cut where the program is.

    Args:
      x: pytree of everything that the next stage should receive, at least one array.
    """
    leaves, tree = jax.tree.flatten(x)
    return jax.tree.unflatten(tree, mark_p.bind(*leaves, phase=FORWARD))


def _jvp(primals: Any, tangents: Any, *, phase: str) -> Any:
    outputs = mark_p.bind(*primals, phase=phase)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    tangents = list(tangents)
    if moving:
        # A mark of tangents that is differentiated again stays what it is.
        inner = TANGENT if phase == FORWARD else phase
        for i, t in zip(
            moving, mark_p.bind(*(tangents[i] for i in moving), phase=inner), strict=True
        ):
            tangents[i] = t
    return outputs, tangents


def _transpose(cotangents: Any, *operands: Any, phase: str) -> Any:
    moving = [
        i
        for i, ct in enumerate(cotangents)
        if type(ct) is not ad.Zero and ad.is_undefined_primal(operands[i])
    ]
    found: list[Any] = [None] * len(cotangents)
    if moving:
        for i, ct in zip(
            moving, mark_p.bind(*(cotangents[i] for i in moving), phase=BACKWARD), strict=True
        ):
            found[i] = ct
    return found


def _batch(args: Any, dims: Any, *, phase: str) -> Any:
    return mark_p.bind(*args, phase=phase), dims


mark_p.def_impl(lambda *args, phase: list(args))
mark_p.def_abstract_eval(lambda *avals, phase: list(avals))
ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = _batch
mlir.register_lowering(mark_p, lambda ctx, *args, phase: args)
