"""Refuse programs that their stage marks do not cut, and say what to write instead."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from maxpipe.pipeline import jaxprs
from maxpipe.pipeline.engines.mpmd.marks import BACKWARD, FORWARD, TANGENT, mark_p
from maxpipe.pipeline.jaxprs import shaped, variables

_LOOP = (
    "write the loop over stages in Python with a mark at the end of each pass; a loop over the "
    "layers of one stage, between two marks, may stay"
)
# By primitive: what users call it, and what to write instead.
_REMEDIES = (
    dict.fromkeys(jaxprs.CHECKPOINTS, ("jax.checkpoint", "apply it to the code between two marks"))
    | {"scan": ("a lax.scan or lax.fori_loop", _LOOP), "while": ("a lax.while_loop", _LOOP)}
    | {"cond": ("a lax.cond or lax.switch", "call mark_stage_boundary after it")}
)


def check_marks_are_open(program: ClosedJaxpr) -> None:
    """Raise ValueError if a mark lies in something that runs as a whole, like a loop or branch."""
    _check_open(program.jaxpr)


def _check_open(jaxpr: Jaxpr) -> None:
    for eqn in jaxpr.eqns:
        # Slicing opens calls such as those of jax.jit, so marks may lie in them.
        if eqn.primitive.name in jaxprs.CALLS:
            for inner in jaxprs.inner_jaxprs(eqn):
                _check_open(jaxprs.open_jaxpr(inner))
        elif eqn.primitive is not mark_p and _has_mark(eqn):
            construct, remedy = _REMEDIES.get(
                eqn.primitive.name, (eqn.primitive.name, "call mark_stage_boundary outside of it")
            )
            raise ValueError(
                f"a stage mark lies inside {construct}, which cannot be cut, since it runs on one "
                f"stage as a whole; {remedy}"
            )


def _has_mark(eqn: JaxprEqn) -> bool:
    inner = (jaxprs.open_jaxpr(jaxpr) for jaxpr in jaxprs.inner_jaxprs(eqn))
    return eqn.primitive is mark_p or any(_has_mark(e) for jaxpr in inner for e in jaxpr.eqns)


def check_phases(flat: ClosedJaxpr) -> None:
    """Raise ValueError unless there are marks of a forward alone, or of a forward and its gradient.

    Allowed are some forward marks, then either no backward marks or equally many.

    Args:
      flat: the traced program with its calls opened.
    """
    marks = [eqn for eqn in flat.jaxpr.eqns if eqn.primitive is mark_p]
    phases = [eqn.params["phase"] for eqn in marks]
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
    if phases.count(BACKWARD) < len(forward):
        raise ValueError(_without_gradient(flat.jaxpr, marks))
    raise ValueError(
        f"the marks come in the order {', '.join(phases)}; slice jax.value_and_grad of a loss in "
        f"which no other gradient passes through a mark"
    )


def _without_gradient(jaxpr: Jaxpr, marks: Sequence[JaxprEqn]) -> str:
    """Return why some forward mark has no backward one."""
    read = {v for eqn in jaxpr.eqns for v in variables(eqn.invars)} | {*variables(jaxpr.outvars)}
    # The usual mistakes concern one mark; what is left concerns the function as a whole.
    forward = [eqn for eqn in marks if eqn.params["phase"] == FORWARD]
    for index, eqn in enumerate(forward):
        name = f"stage mark {index} of {len(forward)} (counted from 0 in the order of the calls)"
        # Differentiation drops what no loss depends on, and the backward mark with it.
        if read.isdisjoint(eqn.outvars):
            return f"nothing uses the result of {name}; write x = mark_stage_boundary(x)"
        if not any(jnp.issubdtype(shaped(v).dtype, jnp.inexact) for v in eqn.outvars):
            return f"{name} lets only integers through, which have no gradient; mark activations"
        if "has_tangents" not in eqn.params:
            return (
                f"nothing before {name} depends on a trained parameter by differentiable code, "
                f"outside of jax.lax.stop_gradient and jax.custom_vjp; put that code after the "
                f"first trained parameter, or pass its weights in params"
            )
    return (
        f"gradients pass through {len(marks) - len(forward)} of {len(forward)} stage marks; mark "
        f"what the loss depends on by differentiable code, outside of jax.lax.stop_gradient and "
        f"jax.custom_vjp"
    )
