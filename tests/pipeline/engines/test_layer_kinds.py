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
from helpers.engines import EngineUnderTest, Result, assert_same, canonical_params, make_batch, tiny
from helpers.mpmd_under_test import MpmdUnderTest

from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram

ROWS = 16
PATTERN = ["local", "local", "local", "local_nope", "local", "global"]
MODEL = {
    "model.num_layers": 7,
    "model.layer_pattern": PATTERN,
    "model.attention_window": 3,
    "model.rope_theta": 1000.0,
    "model.rope_theta_local": 20.0,
    "model.rope_scaling.type": "yarn",
    "model.rope_scaling.factor": 4,
    "model.rope_scaling.original_max_position": 16,
    "model.rope_fraction": 0.5,
    "model.attention_sinks": True,
    "model.attention_soft_cap": 4,
    "model.query_scale": 0.7,
    "model.norm_placement": "sandwich",
    "model.norm_offset": True,
    "model.qk_norm": True,
    "model.qk_norm_scope": "full",
    "model.mlp_activation": "gelu_tanh",
    "model.mlp_bias": True,
    "model.attention_output_bias": True,
    "model.embed_scale": 1.5,
    "model.residual_scale": 0.8,
    "model.logit_scale": 0.6,
    "model.tie_embeddings": True,
}
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
ENGINES = {
    "sequential": {"pipeline.num_microbatches": 2},
    "circular": {**STAGES, "pipeline.schedule": "circular", "pipeline.layers_per_stage": [3, 4]},
    "scheduled": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.num_repeats": 2,
        "pipeline.layers_per_stage": [1, 2, 2, 2],
        "model.rotation": "product",
        "model.gating": "separate",
    },
    "mpmd": {
        **STAGES,
        "pipeline.schedule": "1f1b",
        "pipeline.layers_per_stage": [4, 3],
        "model.rotation": "product",
        "model.gating": "separate",
    },
}


def config_of(engine, **values):
    return tiny(**MODEL | {"pipeline.engine": engine} | ENGINES[engine] | values)


@cache
def unrolled():
    """Return loss and gradients of the batch on one device, layer after layer."""
    model = tiny(**MODEL).model
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
DEFAULT_SPLITS = (("scheduled", "tensor"), ("circular", "context"))
SPLITS = [
    pytest.param(*split, marks=[] if split in DEFAULT_SPLITS else [pytest.mark.slow])
    for split in product(("scheduled", "mpmd", "circular", "sequential"), ("tensor", "context"))
]


@pytest.mark.parametrize(("engine", "axis"), SPLITS)
def test_layers_that_differ_equal_the_unrolled_model_with_two_devices_along_an_axis(engine, axis):
    config = config_of(engine, **{f"mesh.ici.{axis}": 2})
    subject = MpmdUnderTest(config) if engine == "mpmd" else EngineUnderTest(config)
    assert_same(subject.train(make_batch(ROWS)), unrolled())
