"""A batch whose routing rounding may decide is named and drawn again; other differences fail."""

import dataclasses

import jax
import numpy as np
import pytest

from helpers import routing
from helpers.engines import EngineUnderTest, Result, make_batch, sequential, tiny

ROWS = 4
MODEL = tiny("num_layers=2 moe.experts=4 moe.per_token=2 moe.mlp_dim=16").model


def test_difference_fails_unless_a_routing_is_close(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_batch(ROWS)["tokens"]

    def train(batch: routing.Batch) -> Result:
        result = sequential(MODEL, ROWS).train(batch)
        is_wrong = np.array_equal(batch["tokens"], first)
        gradients = jax.tree.map(lambda g: (1 + is_wrong) * g, result.gradients)
        return dataclasses.replace(result, gradients=gradients)

    with pytest.raises(AssertionError, match="relative differences"):
        routing.assert_same_as_one_device(train, MODEL, ROWS)

    def close_routing(engine: EngineUnderTest, batch: routing.Batch) -> str | None:
        return "close" if np.array_equal(batch["tokens"], first) else None

    monkeypatch.setattr(routing, "close_routing", close_routing)
    routing.assert_same_as_one_device(train, MODEL, ROWS)
    assert capsys.readouterr().out == "seed 0: close; another seed\n"
