"""Projections in 8 bits have the same loss and gradients on every engine and layout.

Two layouts sum in another order. Where an activation or gradient over its scale lies within the
difference of a half, as 18.500011 in a layer of 42 or 31.5, the two may round it to neighbours, and
all that follows differs, by a quantum: no fault of either. So no batch may differ by more than
that, and one of several not at all. A layout with other scales, or without a part of a sum, differs
by more, or for every batch.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest
from helpers.engines import (
    LATENT,
    EngineUnderTest,
    Result,
    assert_same,
    make_batch,
    sequential,
    tiny,
)
from helpers.mpmd_under_test import MpmdUnderTest

from maxpipe.config.sections import ModelConfig

ROWS = 8  # few, so that few values are close to a half
SEEDS = 3
QUANTUM = 1e-2  # what rounding to neighbours changes at most; docs/models.md
OF_BFLOAT16 = 5e-2  # what the order of sums changes at most; 2.2e-2 without 8 bits
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
INT8 = {"model.quantisation": "int8", "model.quantised_passes": "full"}
FP8 = {"model.quantisation": "fp8", "model.quantised_passes": "full"}
CASES = {
    "sequential": {
        **INT8,
        "pipeline.engine": "sequential",
        "pipeline.num_microbatches": 2,
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
        "mesh.ici.context": 2,
    },
    "lockstep_1f1b": {
        **INT8,
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
    },
    "lockstep_zb": {
        **FP8,
        **STAGES,
        "pipeline.schedule": "lockstep_zb",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.tensor": 2,
    },
    "circular": {
        **INT8,
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.num_repeats": 2,
        "pipeline.fsdp_gather": "per_repeat",
        "mesh.ici.fsdp": 2,
        "mesh.ici.tensor": 2,
    },
    "circular_forward": {
        "model.quantisation": "fp8",
        **STAGES,
        "pipeline.schedule": "circular",
        "pipeline.remat_policy": "save_qkv_proj",
        "mesh.ici.context": 2,
        "mesh.ici.tensor": 2,
    },
    "1f1b": {**FP8, **STAGES, "pipeline.schedule": "1f1b", "mesh.ici.tensor": 2},
    "zb_v": {
        **INT8,
        **STAGES,
        "pipeline.schedule": "zb_v",
        "pipeline.remat_policy": "minimal",
        "mesh.ici.fsdp": 2,
    },
    "latent": {
        **INT8,
        **STAGES,
        **LATENT,
        "pipeline.schedule": "lockstep_1f1b",
        "mesh.ici.data": 2,
    },
    "lora": {
        **INT8,
        **STAGES,
        "model.lora.rank": 2,
        "model.lora.alpha": 6.0,
        "pipeline.schedule": "lockstep_1f1b",
        "mesh.ici.tensor": 2,
    },
}


# The others differ little from these.
FIRST = ("lockstep_1f1b", "1f1b")
MARKED = [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.slow]) for n in CASES]


def assert_same_as_one_device(
    train: Callable[[dict[str, np.ndarray]], Result], model: ModelConfig
) -> None:
    """Assert that no batch differs by more than `QUANTUM`, and one of `SEEDS` not at all."""
    differences = []
    for seed in range(SEEDS):
        batch = make_batch(ROWS, seed=seed)
        actual, expected = train(batch), sequential(model, ROWS).train(batch)
        assert_same(actual, expected, tolerance=QUANTUM)
        try:
            assert_same(actual, expected)
        except AssertionError as error:
            differences.append(f"seed {seed}: {error}")
    assert len(differences) < SEEDS, f"all of {SEEDS} batches differ: {differences}"


@pytest.mark.parametrize("name", MARKED)
def test_loss_and_gradients_equal_those_of_one_device(name):
    config = tiny(**{"data.global_batch_size": ROWS} | CASES[name])
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    assert_same_as_one_device(subject(config).train, config.model)


@pytest.mark.slow
def test_in_bfloat16_loss_and_gradients_over_tensor_are_near_those_of_one_device():
    values = {"model.dtype": "bfloat16", "data.global_batch_size": ROWS}
    config = tiny(**values | CASES["lockstep_1f1b"] | {"mesh.ici.fsdp": 1})
    subject = EngineUnderTest(config)
    for seed in range(SEEDS):
        batch = make_batch(ROWS, seed=seed)
        actual, expected = subject.train(batch), sequential(config.model, ROWS).train(batch)
        assert actual.loss == pytest.approx(expected.loss, rel=1e-4)
        assert_same(actual, expected, tolerance=OF_BFLOAT16)


@pytest.mark.parametrize("passes", ["forward", "full"])
def test_loss_and_gradients_of_8_bits_are_near_those_of_float32(passes):
    model = tiny(**{"model.quantisation": "int8", "model.quantised_passes": passes}).model
    batch = make_batch(ROWS)
    quantised, plain = (sequential(m, ROWS).train(batch) for m in (model, tiny().model))
    assert quantised.loss != plain.loss
    assert quantised.loss == pytest.approx(plain.loss, rel=0.01)
    with pytest.raises(AssertionError, match="relative differences"):
        assert_same(quantised, dataclasses.replace(plain, loss=quantised.loss))
    assert_same(quantised, plain, tolerance=0.1)


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_descent_along_gradients_of_8_bits_lowers_the_loss(form):
    values = {"model.quantisation": form, "model.quantised_passes": "full"}
    engine = EngineUnderTest(tiny(**values, **{"pipeline.engine": "sequential"}))
    batch, losses = make_batch(ROWS), []
    for _ in range(8):
        result = engine.train(batch)
        losses.append(result.loss)
        engine.params = jax.tree.map(lambda p, g: p - 0.3 * g, engine.params, result.gradients)
    assert losses[-1] < losses[0] - 0.5, losses
