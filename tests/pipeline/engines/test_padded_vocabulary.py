"""Rows that pad the embedding table and the head change no loss and no gradient, on any engine."""

from functools import cache

import jax
import numpy as np
import pytest
from helpers import engines, mpmd_under_test
from helpers.engines import VOCAB_SIZE, EngineUnderTest, Result, assert_same, make_batch, tiny
from helpers.mpmd_under_test import MpmdUnderTest

from maxpipe.model.program import ModelProgram

ROWS = 16
PADDED = 80
LAYOUTS = {
    "sequential": {"pipeline.engine": "sequential", "mesh.ici.tensor": 4, "model.logit_tiles": 3},
    "scheduled": {
        "pipeline.schedule": "lockstep_1f1b",
        "mesh.ici.stage": 2,
        "mesh.ici.fsdp": 2,
        "pipeline.num_microbatches": 4,
    },
    "circular": {
        "mesh.ici.stage": 2,
        "mesh.ici.tensor": 2,
        "pipeline.schedule": "circular",
        "pipeline.num_microbatches": 4,
    },
    "mpmd": {
        "mesh.ici.stage": 2,
        "mesh.ici.tensor": 2,
        "pipeline.schedule": "1f1b",
        "pipeline.num_microbatches": 4,
    },
}
draw = engines.canonical_params


def draw_padded(program):
    """Return the parameters of the model without padding, with rows that would be predicted."""
    plain = draw(
        ModelProgram(tiny(**{"model.tie_embeddings": program.config.tie_embeddings}).model)
    )

    def pad(path, array):
        axis = {"embedding": 0, "kernel": 1}.get(path[-1].key)
        if axis is None or array.shape[axis] == program.config.vocab_size:
            return array
        width = [(0, PADDED - VOCAB_SIZE if i == axis else 0) for i in range(array.ndim)]
        return np.pad(array, width, constant_values=9.0)

    return jax.tree_util.tree_map_with_path(pad, plain)


def plain(tied):
    return {"model.tie_embeddings": tied, "data.global_batch_size": ROWS}


@cache
def unpadded(tied):
    """Return an engine with the model as it is, and its result."""
    engine = EngineUnderTest(tiny(**plain(tied), **{"pipeline.engine": "sequential"}))
    return engine, engine.train(make_batch(ROWS))


@pytest.mark.parametrize(
    ("engine", "tied"),
    [
        ("sequential", False),
        ("scheduled", True),
        pytest.param("circular", False, marks=pytest.mark.slow),
        pytest.param("mpmd", True, marks=pytest.mark.slow),
    ],
)
def test_padded_model_has_the_losses_and_gradients_of_the_unpadded_one(engine, tied, monkeypatch):
    reference, expected = unpadded(tied)
    monkeypatch.setattr(engines, "canonical_params", draw_padded)
    monkeypatch.setattr(mpmd_under_test, "canonical_params", draw_padded)
    sizes = {"model.vocab_size": PADDED, "model.unpadded_vocab_size": VOCAB_SIZE}
    config = tiny(**plain(tied), **LAYOUTS[engine], **sizes)
    assert config.pipeline.engine == engine
    padded = (MpmdUnderTest if engine == "mpmd" else EngineUnderTest)(config)
    actual = padded.train(make_batch(ROWS))
    embedding = actual.gradients["embed"]["embedding"]
    assert not embedding[VOCAB_SIZE:].any()
    actual.gradients["embed"]["embedding"] = embedding[:VOCAB_SIZE]
    if not tied:
        kernel = actual.gradients["head"]["kernel"]
        assert not kernel[:, VOCAB_SIZE:].any()
        actual.gradients["head"]["kernel"] = kernel[:, :VOCAB_SIZE]
    assert_same(Result(actual.loss, actual.gradients), expected)
    if engine == "sequential":
        sums = padded.evaluate(make_batch(ROWS))
        for name, value in reference.evaluate(make_batch(ROWS)).items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-5)
