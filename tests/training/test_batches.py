import jax
import numpy as np
from helpers.engines import make_batch, make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.training.batches import BatchPlacer, all_rows

AXES = {"mesh.ici.data": 2, "mesh.ici.stage": 2, "mesh.ici.fsdp": 2}


def test_placed_rows_keep_their_order_over_any_sharding():
    for spec in [P(("data", "fsdp"), None), P("fsdp", None), P(None, None), P("data", "stage")]:
        batch = make_batch(8)
        place = BatchPlacer(make_mesh(tiny(**AXES)), spec, 8)
        assert place.rows == list(range(8))
        for name, x in place(batch).items():
            assert x.sharding.spec == spec
            np.testing.assert_array_equal(x, batch[name])


def test_all_rows_of_two_processes_are_joined_by_row(monkeypatch):
    """This process has the rows 0, 1; the other one 2, 3, and both also row 4."""
    from jax.experimental import multihost_utils

    state = np.arange(15, dtype=np.int64).reshape(5, 3) + 2**40
    assert all_rows(state, range(5), 5) is state  # all of them are of this process
    ours, theirs = [0, 1, 4], [2, 3, 4]

    def gather(values):
        bits, owned = values
        assert bits.dtype == np.uint32  # JAX without x64 would cut 64-bit integers
        other = np.zeros_like(bits), np.zeros_like(owned)
        other[0][theirs] = np.ascontiguousarray(state[theirs]).view(np.uint32)
        other[1][theirs] = 1
        return np.stack([bits, other[0]]), np.stack([owned, other[1]])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    np.testing.assert_array_equal(all_rows(state[ours], ours, 5), state)
