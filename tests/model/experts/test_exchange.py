"""Experts that devices share compute what those of one device do, whatever tokens choose."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.ragged import ragged_all_to_all
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxpipe.config import ConfigError
from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.model.experts import imbalance
from maxpipe.model.experts.blocks import Blocks
from maxpipe.model.experts.capacity import layout_for
from maxpipe.model.experts.dispatch import arrange
from maxpipe.model.experts.exchange import all_to_all, choose_dispatch, ragged, ring, sparse
from maxpipe.model.experts.mixture import ExpertWeights, experts_with
from maxpipe.plan.jaxpr_flops import program_flops

DEVICES, EXPERTS, PER_TOKEN, EMBED, WIDTH = 4, 8, 3, 4, 6
MOE = MoEConfig(experts=EXPERTS, per_token=PER_TOKEN)
ROWS = P("expert")


def gate_up(gate, up):
    return jax.nn.silu(gate) * up


def over_devices(shared):
    mesh = Mesh(jax.devices()[:DEVICES], ("expert",))
    return jax.shard_map(shared, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)


def operands(choice):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float32)

    x, combine = draw(4, 6, EMBED), draw(4, 6, PER_TOKEN)
    shape = (EXPERTS, EMBED, WIDTH)
    matrices = draw(*shape), draw(*shape), draw(EXPERTS, WIDTH, EMBED)
    biases = (draw(EXPERTS, width) for width in (WIDTH, WIDTH, EMBED))
    weights = ExpertWeights(*matrices, *biases)
    return x, choice(rng), combine, weights


def any_experts(rng):
    chosen = [rng.permutation(EXPERTS)[:PER_TOKEN] for _ in range(24)]
    return jnp.asarray(np.array(chosen, np.int32).reshape(4, 6, PER_TOKEN))


def the_same_experts(rng):
    return jnp.broadcast_to(jnp.array([0, 1, 2], jnp.int32), (4, 6, PER_TOKEN))


def few_of_any(rng):
    return jnp.where(jnp.asarray(rng.random((4, 6, 1)) < 0.5), EXPERTS, any_experts(rng))


def value_and_gradients_of(experts):
    def loss(x, combine, weights, chosen):
        return jnp.sum(jnp.sin(experts(x, chosen, combine, weights)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@pytest.fixture(scope="module")
def of_one_device():
    layout = layout_for(Blocks.layout, MOE)
    return value_and_gradients_of(experts_with(layout, Blocks.multiply, gate_up))


def experts_of_a_device(multiply=Blocks.multiply, *, usual=False):
    layout = layout_for(Blocks.layout, MOE, DEVICES, usual=usual)
    return experts_with(layout, multiply, gate_up)


def either_rows(monkeypatch, usual, always):
    monkeypatch.setattr(imbalance, "_LEAST", 0)
    return imbalance.for_imbalance(usual, always, MOE, DEVICES)


@pytest.mark.parametrize(
    ("dispatch", "has_usual_rows"),
    [
        (ring, False),
        (all_to_all, True),
        (ragged, True),
        pytest.param(ring, True, marks=pytest.mark.slow),
        pytest.param(all_to_all, False, marks=pytest.mark.slow),
        pytest.param(ragged, False, marks=pytest.mark.slow),
    ],
)
def test_shared_experts_compute_every_choice_with_the_gradients_of_one_device(
    of_one_device, dispatch, has_usual_rows, monkeypatch
):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    experts = experts_of_a_device()
    if has_usual_rows:
        experts = either_rows(monkeypatch, experts_of_a_device(usual=True), experts)
    split = value_and_gradients_of(over_devices(dispatch(experts)))
    for choice in (any_experts, the_same_experts, few_of_any):
        x, chosen, combine, weights = operands(choice)
        expected = of_one_device(x, combine, weights, chosen)
        actual = split(x, combine, weights, chosen)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), actual, expected)


def test_a_device_has_rows_for_a_usual_share_until_it_gets_more(monkeypatch):
    always, few = experts_of_a_device(), experts_of_a_device(usual=True)

    def doubled(*operands):  # shows what has run
        return 2 * few(*operands)

    either = either_rows(monkeypatch, doubled, always)

    def sums(experts):
        return jax.value_and_grad(lambda *a: jnp.sum(experts(*a)), argnums=(0, 2, 3))

    # Of 72 assignments a device's even share is 18, and 27 are usual; 48 are to experts 0 and 1.
    for choice, times in ((few_of_any, 2), (the_same_experts, 1)):
        x, chosen, combine, weights = operands(choice)
        own = x, jnp.minimum(chosen, 2), combine, jax.tree.map(lambda a: a[:2], weights)
        expected = jax.tree.map(lambda a, times=times: times * a, sums(always)(*own))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), sums(either)(*own), expected)
    # Stages that are mapped do not run both.
    text = str(jax.make_jaxpr(jax.vmap(either))(*jax.tree.map(lambda a: a[None], own)))
    assert "cond[" in text


def test_blocks_without_rows_of_this_device_are_not_multiplied():
    layout = Blocks.layout(16, 2, 64)
    assert layout.is_sparse
    assert not Blocks.layout(16, 2).is_sparse
    # Two of 64 assignments are to experts of this device, whose number others have.
    places = arrange(jnp.array([[0, 1], *[[2, 2]] * 31], jnp.int32), 2, layout)
    np.testing.assert_array_equal(places.sizes, [1, 1])
    assert int(jnp.sum(places.assignments < 64)) == 2
    rows = jnp.ones((layout.num_rows, EMBED)).at[2 * layout.alignment :].set(jnp.nan)
    weights = jnp.ones((2, EMBED, WIDTH))
    product = Blocks.multiply(rows, weights, places, layout)
    np.testing.assert_array_equal(product[: 2 * layout.alignment], EMBED)
    np.testing.assert_array_equal(product[2 * layout.alignment :], 0)

    # Nor where stages are mapped, in which conditionals would compute both branches.
    def over_stages(rows, places, weights):
        return Blocks.multiply(rows, weights, places, layout)

    stacked = jax.tree.map(lambda a: a[None], (rows, places, weights))
    text = str(jax.make_jaxpr(jax.vmap(over_stages))(*stacked))
    assert "cond[" in text
    assert jnp.array_equal(jax.vmap(over_stages)(*stacked)[0], product)


@pytest.mark.parametrize("has_usual_rows", [False, True])
def test_flops_of_shared_experts_are_within_a_third_of_those_of_chosen_ones(
    has_usual_rows, monkeypatch
):
    tokens, width = 512, 64
    multiply = sparse(Blocks.multiply, DEVICES)
    experts = experts_of_a_device(multiply)
    if has_usual_rows:
        experts = either_rows(monkeypatch, experts_of_a_device(multiply, usual=True), experts)
    split = over_devices(ring(experts))
    shape = (EXPERTS, width, width)
    weights = ExpertWeights(*(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(3)))
    x, combine = (jax.ShapeDtypeStruct((4, tokens, n), jnp.float32) for n in (width, PER_TOKEN))
    chosen = jax.ShapeDtypeStruct(combine.shape, jnp.int32)

    def loss(x, combine, weights, chosen):
        return jnp.sum(split(x, chosen, combine, weights))

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    flops = program_flops(jax.make_jaxpr(gradient)(x, combine, weights, chosen))
    active = 3 * 4 * tokens * PER_TOKEN * 2 * 3 * width * width
    assert active <= flops <= 1.3 * active


def test_dispatch_is_the_ring_unless_it_is_configured_and_the_platform_has_it():
    said = []
    assert choose_dispatch(MoEConfig(experts=8), 4, "cpu", said.append) == "ring"
    assert choose_dispatch(MoEConfig(experts=8), 4, "tpu", said.append) == "ring"
    assert said[0].startswith("model.moe.dispatch=ring: over 4 devices it moves no more")
    assert said[1].removeprefix(said[0]).startswith("; predicted for v5p, the others take longer")
    all_to_all, ragged = (MoEConfig(experts=8, dispatch=x) for x in ("all_to_all", "ragged"))
    assert choose_dispatch(all_to_all, 4, "cpu", said.append) == "all_to_all"
    assert choose_dispatch(ragged, 4, "tpu", said.append) == "ragged"
    assert len(said) == 2
    with pytest.raises(ConfigError, match="of tpu, which cpu lacks; use ring or all_to_all"):
        choose_dispatch(ragged, 4, "cpu", print)
