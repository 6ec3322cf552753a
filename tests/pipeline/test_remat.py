"""Rematerialisation policies: equal results, and less saved for the backward pass."""

import re

import jax
import jax.numpy as jnp
import pytest
from engines import canonical_params, make_batch, tiny
from jax.ad_checkpoint import print_saved_residuals

from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.remat import REMAT


def layer_and_inputs():
    config = tiny()
    program = ModelProgram(config.model)
    layer = jax.tree.map(lambda p: jnp.asarray(p[0]), canonical_params(program)["layers"])
    batch = make_batch(4)
    side = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}
    x = jnp.asarray(jax.random.normal(jax.random.key(0), (4, 8, config.model.embed_dim)))
    return lambda layer, x: program.block(layer, x, side, None)[0], layer, x


@pytest.fixture
def saved(capsys):
    """saved(policy) -> a line for every value that the backward pass keeps beside the arguments."""

    def lines(policy):
        block, layer, x = layer_and_inputs()
        print_saved_residuals(REMAT.get(policy)(block), layer, x)
        found = capsys.readouterr().out.splitlines()
        return [line for line in found if "from the argument" not in line and "constant" not in line]

    return lines


def test_there_are_three():
    assert REMAT.names() == ["full", "minimal", "none"]


def test_full_saves_nothing_but_the_arguments(saved):
    assert saved("full") == []


def test_minimal_saves_the_matrix_products_and_nothing_else(saved):
    inner = {"query_proj", "key_proj", "value_proj", "context", "mlp_gate", "mlp_up"}
    names = [re.search(r"named '(\w+)'", line) for line in saved("minimal")]
    assert all(names)
    # The backward pass of a sum does not look at its terms, so the last product of a sublayer may be missing.
    assert inner <= {name[1] for name in names} <= inner | {"out_proj", "mlp_down"}


def test_none_saves_more(saved):
    assert len(saved("none")) > len(saved("minimal"))


@pytest.mark.parametrize("policy", ["full", "minimal"])
def test_gradients_do_not_change(policy):
    block, layer, x = layer_and_inputs()

    def gradients(f):
        return jax.jit(jax.grad(lambda layer, x: jnp.sum(jnp.sin(f(layer, x))), argnums=(0, 1)))(layer, x)

    for a, b in zip(
        jax.tree.leaves(gradients(REMAT.get(policy)(block))), jax.tree.leaves(gradients(block)), strict=True
    ):
        assert jnp.max(jnp.abs(a - b)) <= 1e-5 * jnp.max(jnp.abs(b))
