"""The tokens that are drawn, and their frequencies."""

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.generate.decoding import Sampling

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
DRAWS = 4000


def drawn(sampling):
    """Return the share of each token in many draws."""
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES), (DRAWS, 5)) + 7
    tokens = jax.jit(sampling)(logits, jax.random.key(0))
    assert tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=5) / DRAWS


def renormalised(kept, power=1.0):
    weights = np.where(np.isin(np.arange(5), kept), PROBABILITIES**power, 0)
    return weights / weights.sum()


def test_sampling_draws_tokens_with_their_probability():
    for sampling, expected in [
        (Sampling(), PROBABILITIES),
        (Sampling(temperature=0), [0, 1, 0, 0, 0]),
        (Sampling(temperature=0.5), renormalised(range(5), 2)),
        (Sampling(top_k=2), renormalised([1, 3])),
        (Sampling(top_k=9), PROBABILITIES),
        (Sampling(top_p=0.69), renormalised([1, 3])),
        (Sampling(top_p=0.71), renormalised([1, 3, 4])),
        (Sampling(top_p=1e-6), [0, 1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.8), renormalised([1, 3])),
    ]:
        shares = drawn(sampling)
        np.testing.assert_allclose(shares, expected, atol=0.03, err_msg=str(sampling))
        assert (shares[np.asarray(expected) == 0] == 0).all(), sampling


def test_sampling_at_a_temperature_near_zero_takes_the_most_likely_token():
    for temperature in [1e-300, 1e-40, 1e-37, 1e-30]:
        logits = jnp.array([[-3.0, 0.0, 5.0, 7.0, -jnp.inf], [-9.0, -2.0, -4.0, -5.0, -jnp.inf]])
        tokens = jax.jit(Sampling(temperature, top_k=4, top_p=0.9))(logits, jax.random.key(0))
        assert tokens.tolist() == [3, 1]


def test_sampling_depends_on_key_and_row():
    logits = jnp.zeros((8, 100))
    first, again, other = (Sampling()(logits, jax.random.key(k)) for k in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert len(np.unique(first)) > 4
