"""Rows of experts: where they come from, what they add up to, and how many suffice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.model.experts.blocks import Blocks
from maxpipe.model.experts.capacity import capacity, layout_for, within_capacity
from maxpipe.model.experts.dispatch import Layout, add_up, arrange, by_row, spread, spread_twice
from maxpipe.model.experts.megablox import Megablox

TOKENS, PER_TOKEN, EXPERTS, WIDTH = 6, 2, 3, 4
CHOICE = np.random.default_rng(0).integers(0, EXPERTS, (TOKENS, PER_TOKEN)).astype(np.int32)
SOME_MISSING = np.where(CHOICE == 1, EXPERTS, CHOICE)


def places_of(missing):
    choice = CHOICE if missing == "none" else SOME_MISSING
    num_rows = choice.size + 2 * (missing != "none")
    return choice, arrange(jnp.asarray(choice), EXPERTS, Layout(num_rows, 1, missing=missing))


@pytest.mark.parametrize("missing", ["none", "last", "any"])
def test_rows_without_an_assignment_are_never_read(missing):
    choice, places = places_of(missing)
    assigned = places.assignments < choice.size
    rows = jax.random.normal(jax.random.key(0), (places.assignments.size, WIDTH))
    kept = (choice < EXPERTS)[:, :, None]
    expected = np.sum(np.where(kept, rows[np.minimum(places.rows, len(rows) - 1)], 0), axis=1)
    undefined = jnp.where(assigned[:, None], rows, jnp.nan)
    np.testing.assert_allclose(add_up(undefined, places, missing), expected, rtol=1e-6)
    # As the gradient of rows they are not read either.
    tokens = jnp.ones((TOKENS, WIDTH))
    (of_tokens,) = jax.vjp(lambda x: spread(x, places, missing), tokens)[1](undefined)
    np.testing.assert_allclose(of_tokens, expected, rtol=1e-6)
    values = jnp.ones((TOKENS, PER_TOKEN))
    (of_values,) = jax.vjp(lambda v: by_row(v, places), values)[1](undefined[:, 0])
    assert np.isfinite(of_values).all()
    assert not of_values[~kept[..., 0]].any()


@pytest.mark.parametrize("missing", ["none", "last", "any"])
def test_rows_of_assignments_are_their_tokens_and_others_have_no_weight(missing):
    choice, places = places_of(missing)
    is_free = np.asarray(places.assignments) == choice.size
    assert is_free.any() == (missing != "none")
    x = 1 + jnp.arange(TOKENS * WIDTH, dtype=jnp.float32).reshape(TOKENS, WIDTH)
    rows = np.asarray(spread(x, places, missing))
    tokens = np.asarray(places.assignments) // PER_TOKEN
    np.testing.assert_array_equal(rows[~is_free], x[tokens[~is_free]])
    assert np.isfinite(rows[is_free]).all()
    weights = 1 + jnp.arange(choice.size, dtype=jnp.float32).reshape(choice.shape)
    of_rows = np.asarray(by_row(weights, places))
    np.testing.assert_array_equal(of_rows[~is_free], 1 + places.assignments[~is_free])
    assert not of_rows[is_free].any()
    _, backward = jax.vjp(lambda r: add_up(r, places, missing), jnp.asarray(rows))
    (gradient,) = backward(x)
    np.testing.assert_array_equal(gradient, rows)


def test_gradients_of_rows_that_two_products_read_are_summed_by_token():
    _, places = places_of("none")
    rows, backward = jax.vjp(lambda x: spread_twice(x, places), jnp.ones((TOKENS, WIDTH)))
    gradients = [jax.random.normal(jax.random.key(i), rows[0].shape) for i in (0, 1)]
    (of_tokens,) = backward(tuple(gradients))
    expected = sum(add_up(gradient, places, "none") for gradient in gradients)
    np.testing.assert_allclose(of_tokens, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "experts", "tile"),
    [(16384, 8, 512), (16376, 8, 256), (4096, 1, 512), (4095, 1, 256), (2048, 1, 256), (1, 1, 128)],
)
def test_tiles_of_rows_are_small_next_to_the_rows_of_an_expert(rows, experts, tile):
    layout = Megablox.layout(rows, experts)
    assert (layout.tile, layout.num_rows % tile) == (tile, 0)


MOE = MoEConfig(experts=4, per_token=2, capacity_factor=1.0)


def test_capacity_is_a_multiple_of_an_even_share_and_at_most_the_sequence():
    # An even share is 3 of 6 tokens.
    for factor, expected in ((0.0, 6), (0.5, 2), (1.0, 3), (1.1, 4), (9.0, 6)):
        moe = MoEConfig(experts=4, per_token=2, capacity_factor=factor)
        assert capacity(moe, 6) == expected


def test_earlier_tokens_of_each_sequence_come_first():
    first = [[0, 1], [0, 2], [0, 1], [0, 3], [1, 0], [1, 2]]
    second = [[3, 2]] * 3 + [[0, 1]] * 3
    choice = jnp.asarray([first, second], jnp.int32)
    expected = [[0, 1], [0, 2], [0, 1], [4, 3], [1, 4], [4, 2]]
    np.testing.assert_array_equal(within_capacity(choice, MOE), [expected, second])
    assert within_capacity(choice, MoEConfig(experts=4, per_token=2)) is choice


@pytest.mark.parametrize("kernel", [Blocks, Megablox])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_rows_suffice_for_experts_that_are_full_in_all_sequences(kernel, factor):
    """On the first of two devices, whose two experts all tokens of 3 sequences choose."""
    moe = MoEConfig(experts=4, per_token=2, capacity_factor=factor)
    sequences, length = 3, 400
    choice = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (sequences, length, 2))
    kept = within_capacity(choice, moe)
    taken = sequences * 2 * capacity(moe, length)
    own = jnp.where(kept < 2, kept, 2).reshape(-1, 2)
    layout = layout_for(kernel.layout, moe, 2)((sequences, length, 2), 2)
    places = arrange(own, 2, layout)
    assert int(places.sizes.sum()) == taken == int(jnp.sum(places.assignments < own.size))
    assert taken <= layout.num_rows <= 1.2 * taken
    if factor == 0.5:
        assert layout.num_rows < layout_for(kernel.layout, MOE, 2)(choice.shape, 2).num_rows
