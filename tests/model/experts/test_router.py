"""The choice of experts with a selection bias and within groups, against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.model.experts.router import losses, route

EXPERTS = 16
INDEX = np.arange(EXPERTS)
LOGITS = np.stack([3 * np.sin((n + 1) * (INDEX + 1) * 1.7) for n in range(5)]).astype(np.float32)
BIAS = (0.3 * np.cos(INDEX * 2.3)).astype(np.float32)
# What DeepseekV3TopkRouter of transformers 5.23 returns for these logits, by expert, with n_group=4
# topk_group=2 num_experts_per_tok=3 routed_scaling_factor=2.5.
CHOSEN = [[0, 3, 11], [3, 5, 7], [8, 13, 14], [0, 3, 14], [0, 8, 11]]
WEIGHTS = [
    [0.8748302, 0.7493147, 0.875855],
    [0.8253394, 0.8458953, 0.8287653],
    [0.8470749, 0.8132255, 0.8396996],
    [0.7545469, 0.8641101, 0.881343],
    [0.8171345, 0.8341794, 0.8486861],
]
CHOSEN_WITHOUT_BIAS = [[0, 4, 7], [3, 5, 7], [8, 13, 14], [2, 14, 15], [0, 8, 11]]
GROUPED = {"router": "sigmoid", "groups": 4, "groups_per_token": 2, "scale": 2.5}


def moe_of(**values):
    return MoEConfig(**{"experts": EXPERTS, "per_token": 3} | values)


def by_expert(choice):
    order = np.argsort(choice.experts, axis=-1)
    return tuple(np.take_along_axis(np.asarray(x), order, -1) for x in choice[:2])


def test_choice_within_groups_equals_that_of_transformers():
    experts, weights = by_expert(route(jnp.asarray(LOGITS), moe_of(**GROUPED), jnp.asarray(BIAS)))
    assert experts.tolist() == CHOSEN
    np.testing.assert_allclose(weights, WEIGHTS, rtol=1e-6)
    without, _ = by_expert(route(jnp.asarray(LOGITS), moe_of(**GROUPED)))
    assert without.tolist() == CHOSEN_WITHOUT_BIAS


def test_group_of_a_softmax_counts_by_its_best_expert():
    logits = jnp.asarray([[9.0, 0, 0, 0, 8, 8, 8, 8]])  # the sum of two would choose the second
    moe = moe_of(experts=8, per_token=2, groups=2)
    assert route(logits, moe).experts.tolist() == [[0, 1]]
    sigmoid = moe_of(experts=8, per_token=2, groups=2, router="sigmoid")
    assert route(logits, sigmoid).experts.tolist() == [[4, 5]]


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_bias_changes_the_choice_and_neither_weights_nor_losses(router):
    moe = moe_of(router=router, normalise=False, balance_loss=0.5)
    logits = jnp.asarray(LOGITS)[None]
    scores = jax.nn.sigmoid(logits) if router == "sigmoid" else jax.nn.softmax(logits)
    bias = jnp.zeros(EXPERTS).at[5].set(10.0)
    choice = route(logits, moe, bias)
    assert (choice.experts[..., 0] == 5).all()
    expected = jnp.take_along_axis(scores, choice.experts, axis=-1)
    np.testing.assert_array_equal(choice.weights, expected)
    np.testing.assert_array_equal(choice.probabilities, route(logits, moe).probabilities)

    def loss(bias):
        choice = route(logits, moe, bias)
        is_token = jnp.ones(logits.shape[:-1], bool)
        return jnp.sum(choice.weights) + losses(logits, choice, is_token, moe)["balance_loss"]

    assert not jax.grad(loss)(bias).any()
