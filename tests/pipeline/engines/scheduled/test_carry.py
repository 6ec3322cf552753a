"""Stores that nothing fills where nothing reads them first."""

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.pipeline.engines.scheduled.carry import filled


def test_filled_leaves_floats_as_they_are_on_accelerators_without_a_value():
    def stores(value):
        return filled((2, 3), jnp.float32, value), filled((2,), jnp.int32, value)

    def lowered(value, platform):
        traced = jax.jit(stores, static_argnums=0).trace(value)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for platform in ("tpu", "cuda"):
        assert lowered(None, platform).count("AllocateBuffer") == 1
        assert "AllocateBuffer" not in lowered(0.0, platform)
    for value in (None, 0.0, np.nan):
        np.testing.assert_array_equal(stores(value)[1], 0)
    assert np.isnan(stores(np.nan)[0]).all()
