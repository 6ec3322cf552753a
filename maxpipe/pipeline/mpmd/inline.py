"""Flat programs: nested calls opened, so that marks and equations of interest are on one level."""

from typing import Any

from jax.extend.core import ClosedJaxpr

from maxpipe.pipeline import jaxprs
from maxpipe.pipeline.mpmd.marks import mark_p


def inline(program: ClosedJaxpr, *, checkpoints: bool = False) -> ClosedJaxpr:
    """The same program without calls.

    Args:
      program: traced by `jax.make_jaxpr`.
      checkpoints: open the bodies of `jax.checkpoint` as well, so that what they compute again can be split.

    Raises:
      ValueError: a stage mark is inside a loop, a conditional or a checkpoint that stays closed.
    """
    flat = jaxprs.inline(program, jaxprs.CALLS + jaxprs.CHECKPOINTS if checkpoints else jaxprs.CALLS)
    for eqn in flat.jaxpr.eqns:
        if any(_has_mark(inner) for inner in jaxprs.inner_jaxprs(eqn)):
            raise ValueError(
                f"a stage mark lies inside {eqn.primitive.name}, which runs as a whole on one stage; "
                f"call mark_stage_boundary outside of it"
            )
    return flat


def _has_mark(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is mark_p or any(_has_mark(inner) for inner in jaxprs.inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )
