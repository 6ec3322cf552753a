"""Rows of experts: where they come from, and what they add up to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.model.experts.dispatch import Layout, add_up, arrange, by_row, spread

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
def test_rows_without_an_assignment_are_zero_and_have_no_gradient(missing):
    choice, places = places_of(missing)
    is_free = np.asarray(places.assignments) == choice.size
    assert is_free.any() == (missing != "none")
    x = 1 + jnp.arange(TOKENS * WIDTH, dtype=jnp.float32).reshape(TOKENS, WIDTH)
    rows = np.asarray(spread(x, places, missing))
    tokens = np.asarray(places.assignments) // PER_TOKEN
    np.testing.assert_array_equal(rows[~is_free], x[tokens[~is_free]])
    assert not rows[is_free].any()
    weights = 1 + jnp.arange(choice.size, dtype=jnp.float32).reshape(choice.shape)
    of_rows = np.asarray(by_row(weights, places))
    np.testing.assert_array_equal(of_rows[~is_free], 1 + places.assignments[~is_free])
    assert not of_rows[is_free].any()
    _, backward = jax.vjp(lambda r: add_up(r, places, missing), jnp.asarray(rows))
    (gradient,) = backward(x)
    np.testing.assert_array_equal(gradient, rows)
