"""All four engines implement one contract: they are built, called and evaluated in the same way."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import (
    assert_same,
    make_batch,
    make_mesh,
    on_one_device,
    reference,
    sequential,
    tiny,
    under_test,
)

from maxpipe.builder import build_engine, build_engine_inputs
from maxpipe.config.catalog import ENGINES

ROWS = 16
STAGES = "stage=2 num_microbatches=4 "
LAYOUTS = {
    "sequential": "engine=sequential num_microbatches=4",
    "circular": STAGES + "schedule=circular num_repeats=2 fsdp=2",
    "scheduled": STAGES + "schedule=lockstep_1f1b num_repeats=2 fsdp=2",
    "mpmd": STAGES + "schedule=1f1b layers_per_stage=[3,1]",
}


def config_of(name):
    config = tiny("dropout=0.2 " + LAYOUTS[name])
    assert config.pipeline.engine == name
    return config


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request):
    config = config_of(request.param)
    return build_engine(config, build_engine_inputs(config, make_mesh(config)))


@cache
def subject_of(name):
    return under_test(config_of(name))


@pytest.fixture(params=LAYOUTS)
def subject(request):
    return subject_of(request.param)


def test_contract_covers_every_engine_of_the_configuration():
    assert set(LAYOUTS) == set(ENGINES)


def test_a_layer_parameter_survives_the_live_layout(engine):
    leaf = jnp.arange(4 * 3, dtype=jnp.float32).reshape(4, 3)
    live = engine.from_canonical(leaf)
    np.testing.assert_array_equal(engine.to_canonical(live), leaf)
    # Live arrays have the dimensions of `layer_axes` in the place of the layers.
    assert {x.ndim for x in jax.tree.leaves(live)} == {len(engine.layer_axes) + 1}


def test_layer_index_has_every_layer_once(engine):
    live = engine.from_canonical(jnp.arange(4))
    index = engine.layer_index()
    assert jax.tree.map(jnp.shape, index) == jax.tree.map(jnp.shape, live)
    layers = np.concatenate([np.ravel(i) for i in jax.tree.leaves(index)])
    assert sorted(layers[layers < 4]) == [0, 1, 2, 3]


def one_device():
    return sequential(config_of("sequential").model, ROWS)


def test_loss_is_divided_by_the_weights_of_all_microbatches(subject):
    """Once, at the end, also where a microbatch has none: no mean of means."""
    batch = make_batch(ROWS)
    batch["weights"][1::4] = 0
    assert_same(subject.train(batch), one_device().train(batch))


def test_loss_of_a_batch_without_weights_is_zero_with_zero_gradients(subject):
    batch = make_batch(ROWS)
    batch["weights"][:] = 0
    result = subject.train(batch)
    assert result.loss == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(result.gradients))


def test_dropout_depends_on_the_key_of_the_step(subject):
    losses = [subject.train(make_batch(ROWS), key=key).loss for key in (0, 0, 1)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize(
    "rows", [10, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 16))]
)
def test_evaluation_of_any_number_of_rows_equals_that_of_one_device(subject, rows):
    """More or less than in training, and such as the microbatches do not divide; no dropout."""
    batch = make_batch(rows, seed=1)
    assert subject.evaluate(batch) == pytest.approx(one_device().evaluate(batch), rel=1e-5)


OUTSIDE = "num_layers=3 parallel_layers=2 "
UNEVEN = "layers_per_stage=[1,3,1,2] num_layers=7 num_repeats=2 "
EVALUATED = [
    f"schedule=lockstep_1f1b fsdp=2 fsdp_gather=once {UNEVEN}",
    f"schedule=lockstep_1f1b fsdp=2 fsdp_prefetch=true outside_layers=before {OUTSIDE}",
    f"schedule=1f1b outside_layers=before {OUTSIDE}",
]
FURTHER = [
    "schedule=lockstep_1f1b fsdp=2 num_repeats=2 delay_activation_forwarding=true skip_idle=false",
    f"schedule=lockstep_1f1b outside_layers=after dropout=0.2 {OUTSIDE}",
    "schedule=circular fsdp=2 num_repeats=2 delay_activation_forwarding=true",
    f"schedule=circular fsdp=2 fsdp_gather=per_repeat {OUTSIDE}",
    f"schedule=circular fsdp=2 fsdp_gather=once {UNEVEN}",
]


def with_slow(first, further):
    return [*first, *(pytest.param(words, marks=pytest.mark.slow) for words in further)]


@pytest.mark.parametrize("words", with_slow(EVALUATED, FURTHER))
def test_evaluation_with_other_options_equals_that_of_one_device(words):
    config, batch = tiny(STAGES + words), make_batch(10, seed=1)
    fill = {"scheduled": "idle_fill", "circular": "bubble_fill"}.get(config.pipeline.engine)
    subject = under_test(config, **({fill: math.nan} if fill else {}))
    expected = sequential(on_one_device(config), ROWS).evaluate(batch)
    assert subject.evaluate(batch) == pytest.approx(expected, rel=1e-5)


IN_BFLOAT16 = [
    "schedule=lockstep_1f1b num_repeats=2 fsdp=2 tensor=2 param_dtype=bfloat16",
    "schedule=circular num_repeats=2 fsdp=2",
]
FURTHER_IN_BFLOAT16 = [
    "schedule=lockstep_1f1b num_repeats=2 fsdp=2 tie_embeddings=true",
    "schedule=lockstep_1f1b data=2 num_repeats=2 parallel_layers=4",
    "schedule=lockstep_1f1b num_repeats=2 fsdp=2 fsdp_gather=once remat_policy=none",
    "schedule=lockstep_1f1b num_repeats=2 fsdp=2 data=2 delay_activation_forwarding=true "
    "remat_policy=minimal",
]


@pytest.mark.parametrize("words", with_slow(IN_BFLOAT16, FURTHER_IN_BFLOAT16))
def test_gradients_in_bfloat16_are_near_those_of_one_device(words):
    """They stay float32 where parameters are; the loss is near that of float32, too."""
    config = tiny(f"dtype=bfloat16 {STAGES} {words}")
    actual = under_test(config).train(make_batch(ROWS))
    dtype = config.model.param_dtype
    assert dtype == "bfloat16" or {leaf.dtype for leaf in jax.tree.leaves(actual.gradients)} == {
        np.dtype("float32")
    }
    assert_same(actual, reference(config.model, ROWS), tolerance=3e-2)
    exact = reference(tiny(f"{STAGES} {words} dtype=float32 param_dtype=float32").model, ROWS)
    assert actual.loss == pytest.approx(exact.loss, rel=3e-3)
