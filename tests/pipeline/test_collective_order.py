"""Collectives on CPU devices wait for what they are said to come after; values stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxpipe.pipeline.manual import after, needs_order


def test_after_any_earlier_values_keeps_every_bit():
    values = {
        "float": jnp.array([-0.0, jnp.nan, jnp.inf, 1.5]),
        "index": jnp.int32(7),
        "flag": jnp.array(True),
    }
    for earlier in (jnp.nan, jnp.inf, -1.0, 0.0, 2.0):
        result = jax.jit(after)(values, jnp.full((2, 3), earlier), [None, jnp.zeros((0,))])
        for name, value in values.items():
            assert np.asarray(result[name]).tobytes() == np.asarray(value).tobytes()
            assert result[name].dtype == value.dtype


def test_after_nothing_returns_the_values_themselves():
    x = jnp.ones(3)
    assert after(x, None, []) is x


def test_after_compiled_leaves_a_dependency():
    """XLA sees through a barrier, but must not see through this."""

    def depends(x, earlier):
        return after(x, jnp.sin(earlier))

    def barrier(x, earlier):
        return jax.lax.optimization_barrier((x, jnp.sin(earlier)))[0]

    operands = jnp.ones(3), jnp.ones(3)
    assert "sine" in jax.jit(depends).lower(*operands).compile().as_text()
    assert "sine" not in jax.jit(barrier).lower(*operands).compile().as_text()


def test_needs_order_of_one_or_several_cpu_devices_is_of_several():
    assert not needs_order(Mesh(np.array(jax.devices()[:1]), ("stage",)))
    assert needs_order(Mesh(np.array(jax.devices()[:2]), ("stage",)))
