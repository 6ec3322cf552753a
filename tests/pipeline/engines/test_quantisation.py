"""Projections in 8 bits have the same loss and gradients on every engine and layout.

Two layouts sum in another order. Where an activation or gradient over its scale lies within the
difference of a half, as 18.500011 in a layer of 42 or 31.5, the two may round it to neighbours, and
all that follows differs, by a quantum: no fault of either. So no batch may differ by more than
that, and one of several not at all. A layout with other scales, or without a part of a sum, differs
by more, or for every batch.
"""

import dataclasses

import pytest
from helpers.engines import LATENT_WORDS, assert_same, make_batch, sequential, tiny, under_test

ROWS = 8  # few, so that few values are close to a half
SEEDS = 3
QUANTUM = 1e-2  # what rounding to neighbours changes at most; docs/quantisation.md
OF_BFLOAT16 = 5e-2  # what the order of sums changes at most; 2.2e-2 without 8 bits
STAGES = "stage=2 num_microbatches=4 "
INT8 = "quantisation=int8 quantised_passes=full "
FP8 = "quantisation=fp8 quantised_passes=full "
FIRST = [
    INT8 + STAGES + "schedule=lockstep_1f1b fsdp=2 tensor=2",
    FP8 + STAGES + "schedule=1f1b tensor=2",
]
# These differ little from them.
FURTHER = [
    INT8 + "engine=sequential num_microbatches=2 fsdp=2 tensor=2 context=2",
    FP8 + STAGES + "schedule=lockstep_zb remat_policy=minimal tensor=2",
    INT8 + STAGES + "schedule=circular num_repeats=2 fsdp_gather=per_repeat fsdp=2 tensor=2",
    STAGES + "quantisation=fp8 schedule=circular remat_policy=save_qkv_proj context=2 tensor=2",
    INT8 + STAGES + "schedule=zb_v remat_policy=minimal fsdp=2",
    INT8 + STAGES + "schedule=lockstep_1f1b data=2 " + LATENT_WORDS,
    INT8 + STAGES + "lora.rank=2 lora.alpha=6.0 schedule=lockstep_1f1b tensor=2",
]


@pytest.mark.parametrize(
    "words", [*FIRST, *(pytest.param(words, marks=pytest.mark.slow) for words in FURTHER)]
)
def test_loss_and_gradients_equal_those_of_one_device(words):
    """No batch differs by more than `QUANTUM`, and one of `SEEDS` not at all."""
    config = tiny(f"global_batch_size={ROWS} {words}")
    subject, differences = under_test(config), []
    for seed in range(SEEDS):
        batch = make_batch(ROWS, seed=seed)
        actual, expected = subject.train(batch), sequential(config.model, ROWS).train(batch)
        assert_same(actual, expected, tolerance=QUANTUM)
        try:
            assert_same(actual, expected)
        except AssertionError as error:
            differences.append(f"seed {seed}: {error}")
    assert len(differences) < SEEDS, f"all of {SEEDS} batches differ: {differences}"


@pytest.mark.slow
def test_in_bfloat16_loss_and_gradients_over_tensor_are_near_those_of_one_device():
    config, batch = (
        tiny(f"{FIRST[0]} fsdp=1 dtype=bfloat16 global_batch_size={ROWS}"),
        make_batch(ROWS),
    )
    actual, expected = under_test(config).train(batch), sequential(config.model, ROWS).train(batch)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-4)
    assert_same(actual, expected, tolerance=OF_BFLOAT16)


@pytest.mark.parametrize(
    ("words", "tolerance"), [("quantisation=int8", 0.1), (INT8, 0.1), (FP8, 0.2)]
)
def test_loss_and_gradients_of_8_bits_are_near_those_of_float32(words, tolerance):
    model = tiny(words).model
    batch = make_batch(ROWS)
    quantised, plain = (sequential(m, ROWS).train(batch) for m in (model, tiny().model))
    assert quantised.loss != plain.loss
    assert quantised.loss == pytest.approx(plain.loss, rel=0.01)
    with pytest.raises(AssertionError, match="relative differences"):
        assert_same(quantised, dataclasses.replace(plain, loss=quantised.loss))
    assert_same(quantised, plain, tolerance)
