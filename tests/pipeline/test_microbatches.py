import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_batch

from maxpipe.pipeline import microbatches


def device_batch(rows):
    return {name: jnp.asarray(x) for name, x in make_batch(rows).items()}


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_split_and_columns_give_microbatch_m_every_mth_row(count):
    batch = microbatches.prepared(device_batch(12), context=1)
    parts, columns = microbatches.split(batch, count), microbatches.columns(batch, count)
    for m in range(count):
        column = microbatches.column(columns, jnp.int32(m))
        assert column.keys() == batch.keys()
        for name, x in batch.items():
            np.testing.assert_array_equal(parts[name][m], x[m::count])
            np.testing.assert_array_equal(column[name], x[m::count])


@pytest.mark.parametrize(("rows", "multiple", "padded"), [(8, 4, 8), (9, 4, 12), (3, 8, 8)])
def test_pad_rows_appends_rows_without_weight(rows, multiple, padded):
    batch = device_batch(rows)
    result = microbatches.pad_rows(batch, multiple)
    for name, x in batch.items():
        assert result[name].shape == (padded, *x.shape[1:])
        np.testing.assert_array_equal(result[name][:rows], x)
    assert not result["weights"][rows:].any()


def test_weight_sum_of_a_batch_without_weights_is_positive():
    batch = device_batch(4)
    assert microbatches.weight_sum(batch) == batch["weights"].sum()
    assert microbatches.weight_sum(batch | {"weights": jnp.zeros((4, 8))}) > 0
