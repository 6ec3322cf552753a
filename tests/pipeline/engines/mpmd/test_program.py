"""The digest by which processes agree on a sliced program and its table."""

import jax.numpy as jnp
import pytest
from helpers.mpmd_programs import chain, inputs, sliced, weights

from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.program import fingerprint
from maxpipe.pipeline.schedules.load import load_schedule

TABLE = load_schedule("1f1b", 3, 4)


def scaled(factor):
    def loss(matrices, x):
        for matrix in matrices:
            x = mark(jnp.sin(x @ matrix) * factor)
        return jnp.sum(x * x)

    return loss


def test_fingerprint_of_another_trace_is_the_same():
    first, second = (sliced(chain, weights(), inputs()) for _ in range(2))
    assert fingerprint(first, TABLE) == fingerprint(second, TABLE)


@pytest.mark.parametrize(
    ("loss", "rows", "table"),
    [
        (scaled(2.0), 2, TABLE),
        (scaled(3.0), 1, TABLE),
        (scaled(3.0), 2, load_schedule("1f1b", 3, 5)),
        (scaled(3.0), 2, load_schedule("gpipe", 3, 4)),
    ],
    ids=["constant", "shape", "microbatches", "schedule"],
)
def test_fingerprint_tells_what_differs(loss, rows, table):
    other = fingerprint(sliced(loss, weights(), inputs()[:rows]), table)
    assert other != fingerprint(sliced(scaled(3.0), weights(), inputs()), TABLE)
