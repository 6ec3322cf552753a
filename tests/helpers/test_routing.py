"""A batch whose routing rounding may decide is named and drawn again; other differences fail."""

import dataclasses

import jax
import numpy as np
import pytest

from helpers import routing
from helpers.engines import EngineUnderTest, Result, make_batch, sequential, tiny

ROWS = 4
MODEL = tiny("num_layers=2 moe.experts=4 moe.per_token=2 moe.mlp_dim=16").model


def with_equal_experts_in_last_layer() -> EngineUnderTest:
    values = {"pipeline.engine": "sequential", "data.global_batch_size": ROWS}
    engine = EngineUnderTest(dataclasses.replace(tiny(**values), model=MODEL))
    weights = engine.params["layers"]["moe"]["router"]
    engine.params["layers"]["moe"]["router"] = weights.at[1].set(0.0)
    return engine


def test_close_routing_names_layer_row_and_token_and_random_weights_have_none() -> None:
    named = routing.close_routing(with_equal_experts_in_last_layer(), make_batch(ROWS))
    assert named == "layer 1, row 0, token 0: margin 0.0e+00 below 1e-06"
    assert routing.close_routing(sequential(MODEL, ROWS), make_batch(ROWS)) is None


def scaled(result: Result) -> Result:
    return dataclasses.replace(result, gradients=jax.tree.map(lambda g: 2 * g, result.gradients))


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
