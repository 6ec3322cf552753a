"""Flat programs: nested calls opened, so that marks and equations of interest are on one level."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr
from maxpipe.pipeline.mpmd.marks import mark_p

CALLS = ("jit", "pjit", "closed_call", "core_call")
CHECKPOINTS = ("checkpoint", "remat2", "remat")


def inline(program: ClosedJaxpr, *, checkpoints: bool = False) -> ClosedJaxpr:
    """The same program without calls.

    Args:
      program: traced by `jax.make_jaxpr`.
      checkpoints: open the bodies of `jax.checkpoint` as well, so that what they compute again can be split.

    Raises:
      ValueError: a stage mark is inside a loop, a conditional or a checkpoint that stays closed.
    """
    opened = CALLS + CHECKPOINTS if checkpoints else CALLS

    def run(*args: Any) -> list[Any]:
        return _evaluate(program, args, opened)

    flat = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals))
    for eqn in flat.jaxpr.eqns:
        if any(_has_mark(inner) for inner in inner_jaxprs(eqn)):
            raise ValueError(
                f"a stage mark lies inside {eqn.primitive.name}, which runs as a whole on one stage; "
                f"call mark_stage_boundary outside of it"
            )
    return flat


def _has_mark(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is mark_p or any(_has_mark(inner) for inner in inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


def _evaluate(program: Any, args: Sequence[Any], opened: Sequence[str]) -> list[Any]:
    jaxpr = open_jaxpr(program)
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        if eqn.primitive.name in opened:
            outputs = _evaluate(next(inner_jaxprs(eqn)), inputs, opened)
        else:
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]
