"""Programs inside traced programs."""

import jax
import jax.numpy as jnp

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr


def test_branches_of_a_conditional_are_found() -> None:
    closed = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0)
    cond = next(eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "cond")
    names = {eqn.primitive.name for inner in inner_jaxprs(cond) for eqn in open_jaxpr(inner).eqns}
    assert names == {"sin", "cos"}


def test_an_equation_without_programs_inside_has_none() -> None:
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert [list(inner_jaxprs(eqn)) for eqn in closed.jaxpr.eqns] == [[]]


def test_a_closed_program_is_opened_and_an_open_one_is_itself() -> None:
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert open_jaxpr(closed) is closed.jaxpr
    assert open_jaxpr(closed.jaxpr) is closed.jaxpr
