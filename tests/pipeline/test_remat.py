"""Rematerialisation policies: equal results, and less saved for the backward pass."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import canonical_params, make_batch, tiny
from jax.ad_checkpoint import print_saved_residuals

from maxpipe.config import PipelineConfig, RematTensorsConfig
from maxpipe.config.catalog import MATMULS, QKV, REMAT_POLICIES, RematPolicy
from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.remat import checkpoint, remat_policy

NAMED = {
    "minimal": RematPolicy(device=MATMULS),
    "minimal_offloaded": RematPolicy(host=MATMULS, on_device="minimal"),
    "qkv_proj_offloaded": RematPolicy(host=QKV, on_device="save_qkv_proj"),
    "save_dot_except_mlp": RematPolicy(device=(*QKV, "out_proj")),
    "save_out_proj": RematPolicy(device=("out_proj",)),
    "save_qkv_proj": RematPolicy(device=QKV),
}


def kept_by(policy):
    return remat_policy(PipelineConfig(remat_policy=policy))


def layer_and_inputs():
    config = tiny()
    program = ModelProgram(config.model)
    layer = jax.tree.map(lambda p: jnp.asarray(p[0]), canonical_params(program)["layers"])
    batch = make_batch(4)
    side = SideInputs(batch["positions"], batch["segment_ids"], jnp.arange(len(batch["tokens"])))
    x = jnp.asarray(jax.random.normal(jax.random.key(0), (4, 8, config.model.embed_dim)))
    return lambda layer, x: program.block(layer, x, side, None)[0], layer, x


@pytest.fixture
def saved(capsys):
    """saved(policy) -> a line for every value that the backward pass keeps beside the arguments."""

    def lines(policy):
        block, layer, x = layer_and_inputs()
        print_saved_residuals(checkpoint(block, kept_by(policy)), layer, x)
        found = capsys.readouterr().out.splitlines()
        return [
            line for line in found if "from the argument" not in line and "constant" not in line
        ]

    return lines


def test_every_policy_is_tested():
    assert [*REMAT_POLICIES] == sorted([*NAMED, "custom", "full", "none"])


@pytest.mark.parametrize("policy", NAMED)
def test_policies_keep_what_their_names_say(policy):
    assert kept_by(policy) == NAMED[policy]


def test_custom_keeps_tensors_one_by_one():
    tensors = RematTensorsConfig(key_proj="device", mlp_up="offload", mlp_down="device")
    kept = remat_policy(PipelineConfig(remat_policy="custom", remat_tensors=tensors))
    assert kept == RematPolicy(device=("key_proj", "mlp_down"), host=("mlp_up",))


def test_custom_can_choose_every_named_tensor_of_a_layer():
    assert set(RematTensorsConfig.__dataclass_fields__) == set(MATMULS)


def test_full_saves_nothing_but_the_arguments(saved):
    assert saved("full") == []


def test_minimal_saves_the_matrix_products_and_nothing_else(saved):
    inner = {"query_proj", "key_proj", "value_proj", "context", "mlp_gate", "mlp_up"}
    names = [re.search(r"named '(\w+)'", line) for line in saved("minimal")]
    assert all(names)
    # The backward pass of a sum does not look at its terms, so the last product of a sublayer may
    # be missing.
    assert inner <= {name[1] for name in names} <= inner | {"out_proj", "mlp_down"}


def test_none_saves_more(saved):
    assert len(saved("none")) > len(saved("minimal"))


def test_an_offloaded_tensor_waits_on_the_host():
    block, layer, x = layer_and_inputs()
    wrapped = checkpoint(block, kept_by("qkv_proj_offloaded"))
    jaxpr = jax.make_jaxpr(lambda layer, x: jax.tree.leaves(jax.vjp(wrapped, layer, x)[1]))(
        layer, x
    )
    on_host = [aval.shape for aval in jaxpr.out_avals if aval.memory_space == jax.memory.Space.Host]
    assert sorted(on_host) == [(4, 8, 2, 4), (4, 8, 2, 4), (4, 8, 4, 4)]  # key, value, query


@pytest.fixture(scope="module")
def gradients():
    """gradients(kept) -> leaves of the gradient of a layer that keeps so much; None: no rematerialisation."""
    block, layer, x = layer_and_inputs()

    @cache
    def compute(kept):
        f = checkpoint(block, kept) if kept else block
        grad = jax.jit(jax.grad(lambda layer, x: jnp.sum(jnp.sin(f(layer, x))), argnums=(0, 1)))
        return jax.tree.leaves(grad(layer, x))

    return compute


@pytest.mark.parametrize("policy", [*NAMED, "full", "none"])
def test_gradients_do_not_change(policy, gradients):
    for a, b in zip(gradients(kept_by(policy)), gradients(None), strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 1e-5 * jnp.max(jnp.abs(b))
