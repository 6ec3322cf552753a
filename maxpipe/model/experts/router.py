"""Choose experts for tokens, and compute the losses that spread tokens over experts.

Scores, choice and weights are float32. Ties go to the expert of the lower index.

Letters: B sequences, T tokens of each, E experts, k experts of a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxpipe.config.catalog import ROUTERS
from maxpipe.config.imports import implementation
from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.sharding.context_parallel import sequence_parts, sum_over_sequence

BALANCE_LOSS = "balance_loss"
Z_LOSS = "z_loss"


class Choice(NamedTuple):
    """What a router decides.

    Attributes:
      experts: int32 [..., k], the chosen experts, the best first.
      weights: float32 [..., k], weights of their outputs in the sum.
      probabilities: float32 [..., E], scores of all experts, which add up to 1.
    """

    experts: jax.Array
    weights: jax.Array
    probabilities: jax.Array


# (logits float32 [..., E], options) -> choice, before normalisation and scale. Routers that take a
# selection bias, as the catalogue says, are called with it too, float32 [E] or None.
RouterFn = Callable[..., Choice]


def route(logits: jax.Array, moe: MoEConfig, bias: jax.Array | None = None) -> Choice:
    """Choose experts for tokens; weights are normalised and scaled.

    Args:
      logits: float32 [..., E].
      moe: `model.moe.*`.
      bias: float32 [E], added to scores for the choice alone; None without one.
    """
    router: RouterFn = implementation(ROUTERS[moe.router])
    choice = router(logits, moe, bias) if ROUTERS[moe.router].takes_bias else router(logits, moe)
    weights = choice.weights
    if moe.normalise and not ROUTERS[moe.router].is_normalised:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return choice._replace(weights=weights if moe.scale == 1 else weights * moe.scale)


def softmax(logits: jax.Array, config: MoEConfig, bias: jax.Array | None = None) -> Choice:
    """Choose by the softmax over all experts, as Mixtral, Qwen3 and OLMoE do.

    The score of a group is its best expert's score, as in DeepSeek-V2 (arXiv:2405.04434).
    """
    scores = jax.nn.softmax(logits, axis=-1)
    return _chosen(scores, config.per_token, _selection(scores, config, bias, best=1))


def topk_softmax(logits: jax.Array, config: MoEConfig) -> Choice:
    """Choose by logits; weights are the softmax over the chosen ones."""
    experts, best, _ = _chosen(logits, config.per_token, logits)
    return Choice(experts, jax.nn.softmax(best, axis=-1), jax.nn.softmax(logits, axis=-1))


def sigmoid(logits: jax.Array, config: MoEConfig, bias: jax.Array | None = None) -> Choice:
    """Choose by the sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437).

    The score of a group is the sum of its two best experts' scores.
    """
    scores = jax.nn.sigmoid(logits)
    selection = _selection(scores, config, bias, best=2)
    experts, weights, _ = _chosen(scores, config.per_token, selection)
    return Choice(experts, weights, scores / jnp.sum(scores, axis=-1, keepdims=True))


def losses(
    logits: jax.Array, choice: Choice, is_token: jax.Array, config: MoEConfig
) -> dict[str, jax.Array]:
    """Return the configured losses of a layer, each a sum over sequences, with its weight.

    Both are functions of one sequence, a row of the batch with all its tokens but padding, so they
    do not depend on how a batch is cut:

    balance_loss: the sum of f_e P_e, where f_e is the share of the sequence's assignments that
    expert e has, times E, and P_e the mean of its probability; 1 where both are even. Only P_e has
    a gradient.
    z_loss: the mean over tokens of the squared logarithm of the softmax's denominator (Zoph et al.
    2022, arXiv:2202.08906).

    Where sequences are split over devices each device returns an equal share of the balance loss,
    and its own tokens' share of the other.

    Args:
      logits: float32 [B, T, E].
      choice: the choice from `route`.
      is_token: bool [B, T], False for padding.
      config: `model.moe.*`.
    """
    if not (config.balance_loss or config.z_loss):
        return {}
    parts, num_experts = sequence_parts(), logits.shape[-1]
    counted = is_token.astype(jnp.float32)  # [B, T]
    # A row of padding alone has no loss.
    tokens = jnp.maximum(sum_over_sequence(jnp.sum(counted, axis=1)), 1)  # [B]
    values = {}
    if config.balance_loss:
        load = sum_over_sequence(assignments(choice.experts, is_token, num_experts))  # [B, E]
        load = load * (num_experts / config.per_token) / tokens[:, None]
        totals = sum_over_sequence(jnp.einsum("bte,bt->be", choice.probabilities, counted))
        of_rows = jnp.sum(load * totals, axis=1) / tokens  # [B]
        values[BALANCE_LOSS] = config.balance_loss * jnp.sum(of_rows) / parts
    if config.z_loss:
        log_z = jax.nn.logsumexp(logits, axis=-1)  # [B, T]
        of_rows = jnp.sum(jnp.square(log_z) * counted, axis=1) / tokens
        values[Z_LOSS] = config.z_loss * jnp.sum(of_rows)
    return values


def assignments(experts: jax.Array, is_token: jax.Array, num_experts: int) -> jax.Array:
    """Return how many of a sequence's tokens have chosen each expert, float32 [B, E].

    Args:
      experts: int32 [B, T, k].
      is_token: bool [B, T], False for padding.
      num_experts: E.
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)  # [B, T, k, E]
    return jax.lax.stop_gradient(jnp.sum(chosen * is_token[..., None, None], axis=(1, 2)))


def _selection(
    scores: jax.Array, config: MoEConfig, bias: jax.Array | None, *, best: int
) -> jax.Array:
    """Return the values to choose by: scores [..., E] plus bias, -inf outside the best groups.

    The score of a group is the sum over its best experts, `best` in number.
    """
    if bias is not None:
        scores = scores + bias
    if config.groups == 1:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], config.groups, -1)  # [..., G, E / G]
    best_scores, _ = jax.lax.top_k(grouped, min(best, grouped.shape[-1]))
    _, groups = jax.lax.top_k(jnp.sum(best_scores, axis=-1), config.groups_per_token)
    is_chosen = jnp.any(jax.nn.one_hot(groups, config.groups, dtype=bool), axis=-2)  # [..., G]
    return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _chosen(scores: jax.Array, count: int, selection: jax.Array) -> Choice:
    """Choose the experts of highest `selection` [..., E]; their weights are `scores` [..., E]."""
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(selection), count)
    return Choice(experts, jnp.take_along_axis(scores, experts, axis=-1), scores)
