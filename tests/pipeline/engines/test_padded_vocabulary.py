"""Rows that pad the embedding table and the head change no loss and no gradient, on any engine."""

import jax
import numpy as np
import pytest
from helpers import engines
from helpers.engines import VOCAB_SIZE, assert_same, make_batch, sequential, tiny, under_test

from maxpipe.model.program import ModelProgram

ROWS = 16
PADDED = 80
LAYOUTS = {
    "sequential": "engine=sequential tensor=4 logit_tiles=3",
    "scheduled": "schedule=lockstep_1f1b stage=2 num_microbatches=4 fsdp=2",
    "circular": "schedule=circular stage=2 num_microbatches=4 tensor=2",
    "mpmd": "schedule=1f1b stage=2 num_microbatches=4 tensor=2",
}
draw = engines.canonical_params


def draw_padded(program):
    plain = draw(ModelProgram(model(program.config.tie_embeddings)))

    def pad(path, array):
        axis = {"embedding": 0, "kernel": 1}.get(path[-1].key)
        if axis is None or array.shape[axis] == program.config.vocab_size:
            return array
        width = [(0, PADDED - VOCAB_SIZE if i == axis else 0) for i in range(array.ndim)]
        return np.pad(array, width, constant_values=9.0)

    return jax.tree_util.tree_map_with_path(pad, plain)


def model(tied):
    return tiny(f"tie_embeddings={tied}").model


FURTHER = (("circular", False), ("mpmd", True))
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER]


@pytest.mark.parametrize(("engine", "tied"), [("sequential", False), ("scheduled", True), *SLOW])
def test_padded_model_has_the_losses_and_gradients_of_the_unpadded_one(engine, tied, monkeypatch):
    plain = sequential(model(tied), ROWS)
    expected = plain.train(make_batch(ROWS))
    monkeypatch.setattr(engines, "canonical_params", draw_padded)
    sizes = f"vocab_size={PADDED} unpadded_vocab_size={VOCAB_SIZE} tie_embeddings={tied}"
    padded = under_test(tiny(f"{LAYOUTS[engine]} {sizes}"))
    actual = padded.train(make_batch(ROWS))
    embedding = actual.gradients["embed"]["embedding"]
    assert not embedding[VOCAB_SIZE:].any()
    actual.gradients["embed"]["embedding"] = embedding[:VOCAB_SIZE]
    if not tied:
        kernel = actual.gradients["head"]["kernel"]
        assert not kernel[:, VOCAB_SIZE:].any()
        actual.gradients["head"]["kernel"] = kernel[:, :VOCAB_SIZE]
    assert_same(actual, expected)
    if engine == "sequential":
        sums = padded.evaluate(make_batch(ROWS))
        for name, value in plain.evaluate(make_batch(ROWS)).items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-5)
