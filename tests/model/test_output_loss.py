"""Losses computed tile by tile equal those of all logits at once, without holding all logits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config import ModelConfig
from maxpipe.model.output_loss import OutputLoss
from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

D, V = 16, 40
OPTIONS = {
    "plain": {},
    "z-loss": {"z_loss": 0.1},
    "cap": {"soft_cap": 2.0},
    "both": {"z_loss": 0.1, "soft_cap": 2.0},
}


def output(tiles, **options):
    return OutputLoss(**({"soft_cap": 0.0, "z_loss": 0.0, "tiles": tiles} | options))


def inputs(shape, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((*shape, D), (D, V)))
    weights = rng.choice([0.0, 1.0, 2.0], shape).astype(np.float32)
    return x, kernel, jnp.asarray(rng.integers(0, V, shape)), jnp.asarray(weights)


def losses_and_gradients(output, x, kernel, targets, weights):
    def scaled(x, kernel):
        loss, cross_entropy = output.losses(x, kernel, targets, weights)
        return loss * 0.25, cross_entropy

    return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True))(x, kernel)


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
    )


@pytest.mark.parametrize(
    ("shape", "tiles", "names"),
    [((2, 12), 3, ["both"]), ((2, 11), 4, [*OPTIONS]), ((30,), 8, ["both"]), ((2, 2), 5, ["both"])],
)
def test_losses_in_tiles_equal_losses_at_once(shape, tiles, names):
    arguments = inputs(shape)
    for name in names:
        at_once, in_tiles = (output(n, **OPTIONS[name]) for n in (1, tiles))
        expected = losses_and_gradients(at_once, *arguments)
        close(losses_and_gradients(in_tiles, *arguments), expected)
        close(in_tiles.losses(*arguments), at_once.losses(*arguments))  # not differentiated


def test_kernel_gradient_of_tiles_is_summed_in_float32():
    """In bfloat16 a sum over 64 tiles would lose more than the one rounding at its end."""
    x, kernel, targets, weights = inputs((256,), jnp.bfloat16)
    exact = losses_and_gradients(
        output(1), x.astype(jnp.float32), kernel.astype(jnp.float32), targets, weights
    )[1][1]
    tiled = losses_and_gradients(output(64), x, kernel, targets, weights)[1][1]
    assert tiled.dtype == jnp.bfloat16
    assert np.abs(np.asarray(tiled, np.float32) - exact).max() < 0.01 * np.abs(exact).max()


def test_reported_cross_entropy_has_no_gradient():
    x, *rest = inputs((2, 12))
    for tiles in (1, 4):
        loss = output(tiles).losses
        assert not np.any(jax.grad(lambda x, loss=loss: loss(x, *rest)[1])(x))


def test_losses_in_tiles_have_no_array_of_all_logits():
    def largest(jaxpr):
        for equation in jaxpr.eqns:
            yield from (v.aval.size for v in equation.outvars)
            for inner in inner_jaxprs(equation):
                yield from largest(open_jaxpr(inner))

    def size(tiles):
        traced = jax.make_jaxpr(lambda *a: losses_and_gradients(output(tiles), *a))
        return max(largest(traced(*inputs((2, 128))).jaxpr))

    assert size(1) >= 2 * 128 * V
    assert size(8) < 2 * 128 * V


@pytest.mark.parametrize(("tiles", "name"), [(1, "both"), (4, "both"), (4, "plain")])
def test_padding_of_the_vocabulary_changes_nothing_and_gets_no_gradient(tiles, name):
    options = OPTIONS[name]
    x, kernel, targets, weights = inputs((2, 11))
    padded = jnp.pad(kernel, ((0, 0), (0, 24)), constant_values=9.0)
    expected = losses_and_gradients(output(tiles, **options), x, kernel, targets, weights)
    with_padding = output(tiles, **options, num_token_ids=V)
    losses, (dx, dkernel) = losses_and_gradients(with_padding, x, padded, targets, weights)
    assert not dkernel[:, V:].any()
    close((losses, (dx, dkernel[:, :V])), expected)
    assert np.all(np.asarray(with_padding.logits(x, padded))[..., V:] == -np.inf)
    model = ModelConfig(vocab_size=V)
    masks = [OutputLoss.of(replace(model, unpadded_vocab_size=n)).num_token_ids for n in (V, V - 1)]
    assert [OutputLoss.of(model).num_token_ids, *masks] == [0, 0, V - 1]
