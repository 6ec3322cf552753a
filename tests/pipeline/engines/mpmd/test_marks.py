"""Stage marks are identities that survive transformations; gradients have their own marks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.pipeline.engines.mpmd.marks import mark_p, mark_stage_boundary


def phases(f, *args):
    """Phases of the marks of a traced function, inner programs included, in order."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive is mark_p:
                yield eqn.params["phase"]
            for parameter in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(parameter, "eqns"):
                    yield from walk(parameter)

    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


def two_stages(w, x):
    x = mark_stage_boundary(jnp.sin(x @ w[0]))
    return jnp.sum(jnp.cos(mark_stage_boundary(x @ w[1])))


@pytest.fixture
def args():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((2, 3, 3)), jnp.float32), jnp.ones((4, 3)) * jnp.arange(
        1.0, 4.0
    )


def test_mark_is_the_identity_on_any_tree():
    tree = {"x": jnp.arange(3), "y": (jnp.ones(()), None)}
    marked = mark_stage_boundary(tree)
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, marked, tree)


def test_gradient_has_a_backward_mark_for_each_mark(args):
    both = ["forward", "forward", "backward", "backward"]
    assert phases(jax.value_and_grad(two_stages), *args) == both
    assert phases(jax.jit(jax.value_and_grad(two_stages)), *args) == both


def test_jvp_marks_tangents(args):
    assert phases(lambda w, x: jax.jvp(two_stages, (w, x), (w, x)), *args).count("tangent") == 2


def test_marks_survive_loops(args):
    def looped(w, x):
        return jnp.sum(
            jax.lax.scan(lambda x, w: (mark_stage_boundary(jnp.sin(x @ w)), None), x, w)[0]
        )

    assert phases(jax.value_and_grad(looped), *args) == ["forward", "backward"]
    plain = jax.grad(lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w[0]) @ w[1])))(*args)
    np.testing.assert_allclose(jax.grad(looped)(*args), plain, rtol=1e-5, atol=1e-6)


def test_backward_mark_has_only_operands_with_a_gradient():
    def f(x, n):
        x, n = mark_stage_boundary((x, n))
        return x * n

    jaxpr = jax.make_jaxpr(jax.grad(f))(2.0, 3)
    backward = [
        e for e in jaxpr.jaxpr.eqns if e.primitive is mark_p and e.params["phase"] == "backward"
    ]
    assert [len(eqn.invars) for eqn in backward] == [1]
