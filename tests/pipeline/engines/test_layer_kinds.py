"""Layers that differ, on every engine: stages end inside the pattern of layers.

The reference runs one layer after another, each as a model of its own in which all layers are
alike, so it looks nothing up by index.
"""

import dataclasses
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import Result, assert_same, canonical_params, make_batch, tiny, under_test

from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram

ROWS = 16
MODEL = (
    "num_layers=7 layer_pattern=[local,local,local,local_nope,local,global] attention_window=3 "
    "rope_theta=1000.0 rope_theta_local=20.0 rope_scaling.type=yarn rope_scaling.factor=4 "
    "rope_scaling.original_max_position=16 rope_fraction=0.5 attention_sinks=true "
    "attention_soft_cap=4 query_scale=0.7 norm_placement=sandwich norm_offset=true qk_norm=true "
    "qk_norm_scope=full mlp_activation=gelu_tanh mlp_bias=true attention_output_bias=true "
    "embed_scale=1.5 residual_scale=0.8 logit_scale=0.6 tie_embeddings=true "
)
STAGES = "stage=2 num_microbatches=4 "
OTHER_PRODUCTS = " rotation=product gating=separate"
LAYOUTS = {
    "sequential": "engine=sequential num_microbatches=2",
    "circular": STAGES + "schedule=circular layers_per_stage=[3,4]",
    "scheduled": STAGES
    + "schedule=lockstep_1f1b num_repeats=2 layers_per_stage=[1,2,2,2]"
    + OTHER_PRODUCTS,
    "mpmd": STAGES + "schedule=1f1b layers_per_stage=[4,3]" + OTHER_PRODUCTS,
}


@cache
def unrolled():
    model = tiny(MODEL).model
    alike = [
        ModelProgram(
            dataclasses.replace(
                model,
                layer_pattern=[kind],
                attention_window=model.attention_window if "local" in kind else 0,
            )
        )
        for kind in model.layer_kinds
    ]
    batch = {name: jnp.asarray(x) for name, x in make_batch(ROWS).items()}
    side = SideInputs(batch["positions"], batch["segment_ids"], jnp.arange(ROWS))

    def loss(params):
        x = alike[0].embed(params, batch["tokens"])
        for i, program in enumerate(alike):
            x, _ = program.block(jax.tree.map(lambda p, i=i: p[i], params["layers"]), x, side, None)
        total, _ = alike[0].head_loss(params, x, batch["targets"], batch["weights"])
        return total / jnp.sum(batch["weights"])

    value, gradients = jax.jit(jax.value_and_grad(loss))(canonical_params(alike[0]))
    return Result(float(value), jax.tree.map(np.asarray, gradients))


# Windows count tokens, not the places of a split sequence.
SPLITS = [
    pytest.param(*split, marks=[] if split == ("scheduled", "tensor") else [pytest.mark.slow])
    for split in product(LAYOUTS, ("tensor", "context"))
]


@pytest.mark.parametrize(("engine", "axis"), SPLITS)
def test_layers_that_differ_equal_the_unrolled_model_with_two_devices_along_an_axis(engine, axis):
    subject = under_test(tiny(f"{MODEL}{LAYOUTS[engine]} {axis}=2"))
    assert_same(subject.train(make_batch(ROWS)), unrolled())
