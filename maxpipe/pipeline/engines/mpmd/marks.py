"""Mark where a traced program is cut into chunks, by identities that survive transformations."""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from maxpipe.pipeline import jaxprs

T = TypeVar("T")
Tangent: TypeAlias = jax.Array | ad.Zero

FORWARD, TANGENT, BACKWARD = "forward", "tangent", "backward"

# Identity on any number of arrays; `phase` distinguishes the program's own marks from derived ones.
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
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, phase: str
) -> tuple[list[jax.Array], list[Tangent | None]]:
    outputs = mark_p.bind(*primals, phase=phase)
    # A mark of tangents that is differentiated again keeps its phase.
    return outputs, _mark_nonzero(tangents, TANGENT if phase == FORWARD else phase)


def _transpose(
    cotangents: Sequence[Tangent], *operands: jax.Array | ad.UndefinedPrimal, **_: str
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


# A mark computes nothing, however it is run: eagerly, abstractly, batched or compiled.
mark_p.def_impl(lambda *args, **_: list(args))
mark_p.def_abstract_eval(lambda *avals, **_: list(avals))
ad.primitive_jvps[mark_p] = _jvp
ad.primitive_transposes[mark_p] = _transpose
batching.primitive_batchers[mark_p] = lambda arrays, dims, **params: (
    mark_p.bind(*arrays, **params),
    dims,
)
mlir.register_lowering(mark_p, lambda ctx, *args, **_: args)


def check_marks_are_open(program: Jaxpr | ClosedJaxpr) -> None:
    """Raise ValueError if a mark lies in something that runs as a whole, like a loop or branch."""
    for eqn in jaxprs.open_jaxpr(program).eqns:
        # Slicing opens calls such as those of jax.jit, so marks may lie in them.
        if eqn.primitive.name in jaxprs.CALLS:
            for inner in jaxprs.inner_jaxprs(eqn):
                check_marks_are_open(inner)
        elif eqn.primitive is not mark_p and _has_mark(eqn):
            name = "jax.checkpoint" if eqn.primitive.name in jaxprs.CHECKPOINTS else eqn.primitive
            raise ValueError(
                f"a stage mark lies inside {name}, which runs on one stage as a whole; call "
                f"mark_stage_boundary outside of it: write a loop over stages in Python, and apply "
                f"jax.checkpoint to the code between two marks"
            )


def _has_mark(eqn: JaxprEqn) -> bool:
    inner = (jaxprs.open_jaxpr(jaxpr) for jaxpr in jaxprs.inner_jaxprs(eqn))
    return eqn.primitive is mark_p or any(_has_mark(e) for jaxpr in inner for e in jaxpr.eqns)


def check_phases(flat: ClosedJaxpr) -> None:
    """Raise ValueError unless there are marks of a forward alone, or of a forward and its gradient.

    Allowed are some forward marks, then either no backward marks or equally many.
    """
    phases = [eqn.params["phase"] for eqn in flat.jaxpr.eqns if eqn.primitive is mark_p]
    forward = [FORWARD] * phases.count(FORWARD)
    if not forward:
        raise ValueError(
            "the program has no stage marks; call mark_stage_boundary after each chunk"
        )
    # Reverse mode transposes the marks of tangents; only forward mode leaves them.
    if TANGENT in phases:
        raise ValueError(
            "the stage marks were differentiated in forward mode, as by jax.jvp or jax.hessian; "
            "slice jax.value_and_grad of a loss"
        )
    # Reverse mode computes the whole forward first, then the backward from the last mark on.
    if phases in (forward, forward + [BACKWARD] * len(forward)):
        return
    # Differentiation drops what no loss depends on, and the backward mark with it.
    if phases.count(BACKWARD) < len(forward):
        raise ValueError(
            f"gradients pass through {phases.count(BACKWARD)} of {len(forward)} stage marks; put "
            f"each, as x = mark_stage_boundary(x) of activations, after a trained parameter and "
            f"before the loss, both by differentiable code: not jax.lax.stop_gradient"
        )
    raise ValueError(
        f"the marks come in the order {', '.join(phases)}; slice jax.value_and_grad of a loss in "
        f"which no other gradient passes through a mark"
    )
