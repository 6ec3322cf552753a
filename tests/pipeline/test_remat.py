"""Rematerialisation policies: equal results, and less saved for the backward pass."""

import re

import jax
import jax.numpy as jnp
import pytest
from helpers.engines import canonical_params, make_batch, tiny
from jax.ad_checkpoint import print_saved_residuals

from maxpipe.config import PipelineConfig, RematTensorsConfig
from maxpipe.config.catalog import EXPERT_CHOICE, MATMULS, RematPolicy
from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.chunk import checkpoint, recomputes_rows, remat_policy


def policy_of(policy):
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
    """saved(policy) -> a line for every value that is saved besides the arguments."""

    def lines(policy):
        block, layer, x = layer_and_inputs()
        print_saved_residuals(checkpoint(block, policy_of(policy)), layer, x)
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if not re.search("from the argument|constant", line)]

    return lines


def test_remat_policy_custom_takes_every_named_tensor_of_a_layer_one_by_one():
    tensors = RematTensorsConfig(key_proj="device", mlp_up="offload", mlp_down="device")
    policy = remat_policy(PipelineConfig(remat_policy="custom", remat_tensors=tensors))
    device = ("key_proj", "mlp_down", EXPERT_CHOICE)  # which says where the MLP's rows belong
    assert policy == RematPolicy(device=device, host=("mlp_up",))
    assert set(RematTensorsConfig.__dataclass_fields__) == set(MATMULS)


def test_checkpoint_saves_the_arguments_and_what_the_policy_says(saved):
    assert saved("full") == []
    minimal = saved("minimal")
    assert len(saved("none")) > len(minimal)
    inner = {"query_proj", "key_proj", "value_proj", "context", "mlp_gate", "mlp_up"}
    names = [re.search(r"named '(\w+)'", line) for line in minimal]
    assert all(names)
    # The backward pass of a sum does not look at its terms, so the last product of a sublayer may
    # be missing.
    assert inner <= {name[1] for name in names} <= inner | {"out_proj", "mlp_down"}


def test_checkpoint_of_an_offloaded_tensor_saves_it_on_the_host():
    block, layer, x = layer_and_inputs()
    wrapped = checkpoint(block, policy_of("qkv_proj_offloaded"))
    jaxpr = jax.make_jaxpr(lambda layer, x: jax.tree.leaves(jax.vjp(wrapped, layer, x)[1]))(
        layer, x
    )
    on_host = [aval.shape for aval in jaxpr.out_avals if aval.memory_space == jax.memory.Space.Host]
    assert sorted(on_host) == [(4, 8, 2, 4), (4, 8, 2, 4), (4, 8, 4, 4)]  # key, value, query


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("engine=sequential num_layers=4", True),
        ("engine=sequential remat_policy=minimal", False),
        ("engine=sequential remat_policy=none", False),
        ("stage=2", True),
        ("stage=2 remat_iterations=false", False),
        ("stage=2 remat_iterations=false remat_layers=true", True),
    ],
)
def test_rows_of_experts_are_recomputed_unless_they_are_saved(words, expected):
    assert recomputes_rows(tiny(words).pipeline) is expected
