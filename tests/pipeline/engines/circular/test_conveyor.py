"""The shift register brings every microbatch to every chunk, and holds no microbatch twice."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.pipeline.engines.circular import conveyor as conveyor_module
from maxpipe.pipeline.engines.circular.conveyor import Conveyor


def labelled_inputs(conveyor):
    return jnp.asarray(100 * conveyor.start)[..., None, None, None]


def label(cell):
    microbatch, chunks = divmod(int(cell.item()), 100)
    return f"{microbatch}.{chunks}"


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize(("S", "V", "M"), [(1, 3, 4), (2, 3, 6), (3, 2, 6), (3, 1, 9), (5, 2, 10)])
def test_conveyor_brings_every_microbatch_to_every_chunk(S, V, M, delay):
    """Stage s of repeat v must be the chunk v * S + s that a microbatch sees."""
    conveyor = Conveyor(S, V, M, delay)
    assert conveyor.num_iterations == M * V + delay * (S - 1)
    io = labelled_inputs(conveyor)
    shift, pending = jnp.full((S, 1, 1, 1), -1), jnp.full((S, 1, 1, 1), -1)
    for t in range(conveyor.num_iterations):
        x = shift.at[0].set(conveyor.read(io, t)[0])
        for s in range(S):
            n = t - delay * s
            if 0 <= n < M * V:
                assert x[s].item() == 100 * (n % M) + n // M * S + s, (t, s)
        leaving, pending = (x + 1, x + 1) if delay == 1 else (pending, x + 1)
        shift = conveyor.send(leaving)
        io = conveyor.advance(io, leaving, shift, t)
    if delay == 2:
        io = conveyor.advance(io, pending, conveyor.send(pending), conveyor.num_iterations)
    np.testing.assert_array_equal(io[..., 0, 0, 0], 100 * conveyor.end + S * V)
    assert sorted(conveyor.end.flat) == list(range(M))


def example_lines(conveyor):
    S, K = conveyor.num_stages, conveyor.num_slots
    state = conveyor.first_state(labelled_inputs(conveyor), {})
    for t in range(conveyor.num_iterations + 1):
        x, is_active = conveyor.stage_inputs(state, t), conveyor.units(t)[0]
        work = [label(x[s]) if is_active[s] else " - " for s in range(S)]
        slots = ["  ".join(label(state.io[s, k]) for s in range(S)) for k in range(K)]
        slots = [f"[{slot}]" if k == t % K else f" {slot} " for k, slot in enumerate(slots)]
        yield f"    {t}    {'      '.join(work)}    {' '.join(slots)}".rstrip()
        state = conveyor.next_state(state, x + 1, {}, t)


def test_conveyor_example_in_the_docstring_is_what_happens():
    lines = list(example_lines(Conveyor(2, 2, 4, 1)))
    print(*lines, sep="\n")
    assert "\n".join(lines) in conveyor_module.__doc__
