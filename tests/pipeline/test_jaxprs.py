"""Read traced programs, open calls, and cut programs out of them."""

import jax
import jax.numpy as jnp
import pytest

from maxpipe.pipeline.engines.mpmd.row_parallel import tracer
from maxpipe.pipeline.jaxprs import (
    CALLS,
    CHECKPOINTS,
    calls_back,
    inline,
    is_cheap,
    is_cheap_or_collective,
)


def names(equations):
    return [eqn.primitive.name for eqn in equations]


@pytest.mark.parametrize(("calls", "closed"), [(CALLS, ["remat2"]), (CALLS + CHECKPOINTS, [])])
def test_inline_opens_nested_calls_and_leaves_others(calls, closed):
    inner = jax.checkpoint(jax.jit(jnp.sin))
    flat = inline(jax.make_jaxpr(jax.jit(lambda x: jnp.cos(inner(x))))(1.0), calls)
    assert names(flat.jaxpr.eqns) == [*(closed or ["sin"]), "cos"]
    assert jax.core.eval_jaxpr(flat.jaxpr, flat.consts, 2.0) == [jnp.cos(jnp.sin(2.0))]


def test_inline_keeps_the_scopes_of_calls_and_of_what_they_call():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def twice(x):
        with jax.named_scope("outer"):
            x = jax.checkpoint(inner)(x)
        return jnp.cos(inner(x))

    flat = inline(jax.make_jaxpr(twice)(1.0), CALLS + CHECKPOINTS)
    scopes = [str(eqn.source_info.name_stack) for eqn in flat.jaxpr.eqns]
    assert list(zip(names(flat.jaxpr.eqns), scopes, strict=True)) == [
        ("sin", "outer/inner"),
        ("sin", "inner"),
        ("cos", ""),
    ]


@pytest.mark.parametrize(
    ("construct", "expected"),
    [
        (lambda show, x: jax.lax.cond(x > 0, show, lambda x: None, x), True),
        (lambda show, x: jax.jit(jax.checkpoint(show))(x), True),
        (lambda show, x: jax.pure_callback(lambda x: x, x, x), False),
        (lambda show, x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), False),
    ],
)
def test_calls_back_of_callbacks_in_any_depth_is_true(construct, expected):
    def f(x):
        return construct(lambda x: jax.debug.callback(lambda _: None, x), x)

    assert any(map(calls_back, jax.make_jaxpr(f)(1.0).jaxpr.eqns)) == expected


def test_gathers_of_parts_are_cheap_or_collective_and_attention_over_parts_is_not():
    mesh = jax.sharding.AbstractMesh((2, 2), ("fsdp", "tensor"))

    def over_tensor(f):
        spec = jax.sharding.PartitionSpec()
        return jax.shard_map(
            f, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
        )

    def f(x):
        x = jax.lax.all_gather(x, "fsdp", tiled=True)
        x = over_tensor(lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True))(x)
        return over_tensor(lambda x: x @ x)(x)

    body = tracer(mesh, ["fsdp"])(f)(jax.ShapeDtypeStruct((2, 2), jnp.float32))
    assert names(body.jaxpr.eqns) == ["all_gather", "shard_map", "shard_map"]
    assert [is_cheap(eqn) for eqn in body.jaxpr.eqns] == [False, False, False]
    assert [is_cheap_or_collective(eqn) for eqn in body.jaxpr.eqns] == [True, True, False]
