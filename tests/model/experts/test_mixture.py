"""Mixtures of experts against a slow reference: every expert for every token, then a mask."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.config import Config, replace, resolve
from maxpipe.config.catalog import ROUTERS
from maxpipe.config.terminal import ignore_note
from maxpipe.model.experts.mixture import ExpertWeights, MixtureOfExperts
from maxpipe.model.experts.router import route
from maxpipe.model.experts.split import build_experts
from maxpipe.model.layers import COUNTS, EXPERT_DROPS, EXPERT_LOAD
from maxpipe.model.parameters import init_params, split_module
from maxpipe.model.program import ModelProgram
from maxpipe.plan.jaxpr_flops import program_flops
from maxpipe.sharding.rules import AxisRules

ROWS, LENGTH, EMBED, WIDTH, EXPERTS, PER_TOKEN = 3, 10, 12, 8, 5, 2


def model_of(**values):
    sizes = {"embed_dim": EMBED, "num_query_heads": 2, "num_kv_heads": 2}
    experts = {"experts": EXPERTS, "per_token": PER_TOKEN, "mlp_dim": WIDTH} | values
    keys = {f"model.{key}": value for key, value in sizes.items()}
    for key, value in experts.items():
        of_mlp = key.startswith("mlp_") and key != "mlp_dim"
        keys[f"model.{key}" if of_mlp else f"model.moe.{key}"] = value
    return resolve(replace(Config(), **keys), 1).model


def layer_of(model, seed=0):
    apply, specs = split_module(lambda: MixtureOfExperts(model))
    params = init_params(specs, jax.random.key(seed))
    for i, name in enumerate(name for name in params if name.endswith("_bias")):
        shape = params[name].shape
        params[name] += 0.5 * jax.random.normal(jax.random.key(i), shape, params[name].dtype)
    x = jax.random.normal(jax.random.key(seed + 1), (ROWS, LENGTH, model.embed_dim))

    @jax.jit
    def apply_all(params, x, is_token=None):
        return apply(params, x, jnp.ones(x.shape[:2], bool) if is_token is None else is_token)

    return apply_all, params, x


def reference(model, params, x):
    """Return what `MixtureOfExperts` computes, by a loop over experts."""
    moe = model.moe
    logits = jnp.einsum("btd,de->bte", x, params["router"]) + params.get("logit_bias", 0)
    to_scores = jax.nn.sigmoid if moe.router == "sigmoid" else jax.nn.softmax
    scores = to_scores(logits)
    order = jnp.argsort(-jax.lax.stop_gradient(scores), axis=-1, stable=True)
    is_chosen = jnp.argsort(order, axis=-1) < moe.per_token  # rank of each expert
    if moe.router == "topk_softmax":
        weights = jax.nn.softmax(jnp.where(is_chosen, logits, -jnp.inf), axis=-1)
    else:
        weights = jnp.where(is_chosen, scores, 0)
        if moe.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
    if moe.capacity_factor:
        even = x.shape[1] * moe.per_token / moe.experts
        weights *= jnp.cumsum(is_chosen, axis=1) <= moe.capacity_factor * even
    y = jnp.zeros_like(x)

    def bias(name, e):
        return params[f"{name}_bias"][e] if model.mlp_bias else 0

    for e in range(moe.experts):
        gate, up = (x @ params[name][e] + bias(name, e) for name in ("gate", "up"))
        if model.mlp_limit:  # gpt-oss
            gate = jnp.where(gate > 0.5, 0.5, gate)
            up = jnp.where(abs(up) > 0.5, jnp.sign(up) / 2, up)
            hidden = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
        else:
            hidden = jax.nn.silu(gate) * up
        down = hidden @ params["down"][e] + bias("down", e)
        y += moe.scale * weights[..., e, None] * down
    if moe.shared_experts:
        shared = params["shared"]
        y += (jax.nn.silu(x @ shared["gate"]) * (x @ shared["up"])) @ shared["down"]
    # Losses, sequence by sequence
    probabilities = scores / scores.sum(-1, keepdims=True)
    balance = z = 0.0
    for row in range(x.shape[0]):
        share = is_chosen[row].sum(0) * moe.experts / (moe.per_token * x.shape[1])
        balance += jnp.sum(share * probabilities[row].mean(0))
        z += jnp.mean(jax.nn.logsumexp(logits[row], axis=-1) ** 2)
    return y, {"balance_loss": moe.balance_loss * balance, "z_loss": moe.z_loss * z}


OPTIONS = [
    {"router": "softmax", "normalise": False, "scale": 1.5},
    {
        "router": "topk_softmax",
        "logit_bias": True,
        "mlp_bias": True,
        "mlp_activation": "quick_gelu",
        "mlp_limit": 0.5,
        "mlp_up_offset": 1.0,
    },
    {"router": "sigmoid", "scale": 2.5, "experts": 8, "per_token": 1},
    {"router": "sigmoid", "per_token": 2, "capacity_factor": 0.5, "shared_experts": 1},
]
FURTHER = [
    {"router": "softmax", "shared_experts": 2},
    {"router": "topk_softmax", "per_token": 3},
    {"router": "softmax", "per_token": 3, "capacity_factor": 1.0},
]


@pytest.mark.parametrize(
    "options",
    [*OPTIONS, *(pytest.param(options, marks=pytest.mark.slow) for options in FURTHER)],
    ids=lambda o: f"{o['router']}-{len(o)}",
)
def test_values_losses_and_gradients_are_those_of_a_loop_over_experts(options):
    assert {of["router"] for of in OPTIONS} == set(ROUTERS)
    model = model_of(balance_loss=0.5, z_loss=0.25, **options)
    apply, params, x = layer_of(model)

    def total(function):
        def run(params, x):
            y, auxiliary = function(params, x)
            auxiliary = {name: a for name, a in auxiliary.items() if name not in COUNTS}
            return jnp.sum(jnp.sin(y)) + sum(auxiliary.values()), (y, auxiliary)

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))

    actual = total(apply)(params, x)
    expected = total(lambda params, x: reference(model, params, x))(params, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (ROWS, LENGTH, EMBED)),
        # The router's gradient needs the rows.
        ({"mlp_bias": True}, (ROWS * LENGTH * PER_TOKEN, EMBED)),
    ],
)
def test_remat_name_of_the_last_product_is_given_to_sums_unless_rows_have_biases(options, shape):
    apply, params, x = layer_of(model_of(**options))
    equations = re.findall(
        r"\[([\d,]+)\] = name\[name=mlp_down\]", str(jax.make_jaxpr(apply)(params, x))
    )
    named = [tuple(map(int, sizes.split(","))) for sizes in equations]
    assert [sizes[1:] for sizes in named] == [shape[1:]]
    assert named[0][0] >= shape[0]  # blocks are filled up with rows


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    model = model_of()
    apply, params, x = layer_of(model)
    params["router"] = jnp.zeros_like(params["router"]).at[:, 3].set(1.0).at[:, 1].set(0.5)
    x = jnp.abs(x)  # every token prefers expert 3, then 1
    assert (route(x @ params["router"], model.moe).experts == jnp.array([3, 1])).all()
    expected, _ = jax.jit(partial(reference, model))(params, x)
    np.testing.assert_allclose(apply(params, x)[0], expected, atol=1e-5)
    # Ties go to the lower index.
    choice = route(jnp.zeros((1, 1, EXPERTS)).at[0, 0, 2].set(1.0), model.moe)
    assert choice.experts[0, 0].tolist() == [2, 0]


def test_padding_counts_neither_in_losses_nor_in_loads():
    """Rows that end in padding have the losses, loads and gradients of those without it."""
    model = model_of(balance_loss=0.5, z_loss=0.25, capacity_factor=0.5)
    apply, params, x = layer_of(model)
    x = x.at[:, 6:].set(0.7)  # padding is one token, over and over
    is_token = jnp.arange(LENGTH)[None] < jnp.array([6, 4, 0])[:, None]

    def total(params, x, is_token):
        auxiliary = apply(params, x, is_token)[1]
        return auxiliary["balance_loss"] + auxiliary["z_loss"], auxiliary

    gradient = jax.jit(jax.grad(total, has_aux=True))
    grads, padded = gradient(params, x, is_token)
    alone = [gradient(params, x[i : i + 1, :n], None) for i, n in ((0, 6), (1, 4))]
    for name in ("balance_loss", "z_loss", EXPERT_LOAD):
        expected = sum(auxiliary[name] for _, auxiliary in alone)
        np.testing.assert_allclose(padded[name], expected, rtol=1e-5, err_msg=name)
    expected = sum(gradient["router"] for gradient, _ in alone)
    np.testing.assert_allclose(grads["router"], expected, rtol=1e-5, atol=1e-7)
    assert padded[EXPERT_LOAD].sum() == PER_TOKEN * 10
    # The capacity is that of the whole length, 2 of 10 tokens.
    drops = sum(jnp.maximum(auxiliary[EXPERT_LOAD] - 2, 0).sum() for _, auxiliary in alone)
    assert padded[EXPERT_DROPS] == drops > 0


def test_only_losses_with_a_weight_are_computed():
    assert ModelProgram(model_of()).auxiliary_names == (EXPERT_LOAD,)
    assert ModelProgram(model_of(z_loss=0.1)).auxiliary_names == (EXPERT_LOAD, "z_loss")
    both = model_of(z_loss=0.1, balance_loss=0.1)
    assert ModelProgram(both).auxiliary_names == ("balance_loss", EXPERT_LOAD, "z_loss")
    dense = dataclasses.replace(model_of(), moe=Config().model.moe)
    assert ModelProgram(dense).auxiliary_names == ()


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_load_counts_each_assignment_and_drops_are_those_above_the_capacity(factor):
    """The load is what tokens choose, so that the selection bias can even it out."""
    model = model_of(capacity_factor=factor)
    apply, params, x = layer_of(model)
    auxiliary = apply(params, x)[1]
    experts = route(x @ params["router"], model.moe).experts
    counts = np.stack([np.bincount(row.ravel(), minlength=EXPERTS) for row in experts])
    assert auxiliary[EXPERT_LOAD].tolist() == counts.sum(0).tolist()
    if factor:
        even = LENGTH * model.moe.per_token / EXPERTS
        assert auxiliary[EXPERT_DROPS] == np.maximum(counts - np.ceil(even), 0).sum() > 0


def test_router_is_float32_in_a_model_of_bfloat16():
    model = dataclasses.replace(model_of(), dtype="bfloat16", param_dtype="bfloat16")
    apply, params, x = layer_of(model)
    assert params["router"].dtype == jnp.float32
    assert params["gate"].dtype == jnp.bfloat16
    y, _ = apply(params, x.astype(jnp.bfloat16))
    in_float32 = jax.tree.map(jnp.float32, params)
    exact, _ = jax.jit(partial(reference, model))(in_float32, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(y), np.float32(exact), atol=0.03)


def test_flops_are_within_a_third_of_those_of_chosen_experts():
    model = model_of(experts=16, per_token=2, mlp_dim=8)
    apply, params, _ = layer_of(model)
    x = jnp.zeros((4, 256, EMBED))

    def loss(params, x):
        return jnp.sum(apply(params, x)[0])

    flops = program_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, x))
    routed = 2 * 3 * model.moe.per_token * EMBED * model.expert_dim
    router = 2 * EMBED * model.moe.experts
    active = 3 * x.shape[0] * x.shape[1] * (routed + router)
    assert active <= flops <= 1.3 * active


@pytest.mark.parametrize(("gating", "count"), [("fused", 0), ("separate", 2)])
def test_tokens_of_experts_are_row_major_with_separate_gating(gating, count):
    config = tiny(f"gating={gating} fsdp=2 moe.experts=4 moe.per_token=2")
    rules = AxisRules(config.sharding.logical_axis_rules, make_mesh(config))
    experts = build_experts(config.model, rules, "cpu", ignore_note)
    embed, width = config.model.embed_dim, config.model.expert_dim
    x, choice = jnp.zeros((2, 8, embed)), jnp.zeros((2, 8, 2), jnp.int32)
    up = jnp.zeros((4, embed, width))
    weights = ExpertWeights(up, up, up.swapaxes(1, 2))
    traced = jax.make_jaxpr(experts)(x, choice, choice.astype(jnp.float32), weights)
    assert str(traced).count("layout_constraint[") == count
