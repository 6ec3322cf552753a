"""The shift register brings every microbatch to every chunk, and holds no microbatch twice."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.pipeline.engines.circular.conveyor import Conveyor


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize(
    ("S", "V", "M"), [(1, 1, 2), (1, 3, 4), (2, 1, 4), (2, 3, 6), (3, 2, 6), (3, 1, 9), (5, 2, 10)]
)
def test_conveyor_brings_every_microbatch_to_every_chunk(S, V, M, delay):
    """Each cell holds 100 * microbatch + chunks seen; stage s of repeat v must be chunk v * S + s of it."""
    conveyor = Conveyor(S, V, M, delay)
    assert conveyor.num_iterations == M * V + delay * (S - 1)
    io = jnp.asarray(100 * conveyor.start)[..., None, None, None]
    shift, pending = jnp.full((S, 1, 1, 1), -1), jnp.full((S, 1, 1, 1), -1)
    for t in range(conveyor.num_iterations):
        x = shift.at[0].set(conveyor.read(io, t)[0])
        for s in range(S):
            n = t - delay * s
            if 0 <= n < M * V:
                assert x[s].item() == 100 * (n % M) + n // M * S + s, (t, s)
        leaving, pending = (x + 1, x + 1) if delay == 1 else (pending, x + 1)
        io = conveyor.advance(io, leaving, t)
        shift = jnp.roll(leaving, 1, axis=0)
    if delay == 2:
        io = conveyor.advance(io, pending, conveyor.num_iterations)
    np.testing.assert_array_equal(io[..., 0, 0, 0], 100 * conveyor.end + S * V)
    assert sorted(conveyor.end.flat) == list(range(M))
