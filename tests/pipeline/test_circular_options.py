"""Options of the circular engine that change what is kept, computed again or fetched, but no result."""

from itertools import product

import jax
import pytest
from engines import PipelineUnderTest, assert_same, make_batch, reference, tiny

ROWS = 16
POLICIES = (
    "full", "none", "minimal", "minimal_offloaded", "qkv_proj_offloaded",
    "save_dot_except_mlp", "save_out_proj", "save_qkv_proj",
)  # fmt: skip
CUSTOM = {
    "pipeline.remat_policy": "custom",
    "pipeline.remat_tensors.query_proj": "device",
    "pipeline.remat_tensors.mlp_up": "offload",
}


def circular(**values):
    """Two stages x two FSDP shards, two repeats of two layers, sizes that tell every weight by its shape."""
    return tiny(
        **{
            "pipeline.engine": "circular",
            "pipeline.num_repeats": 2,
            "pipeline.num_microbatches": 4,
            "model.num_layers": 8,
            "model.embed_dim": 24,
            "model.num_query_heads": 6,
            "model.num_kv_heads": 3,
            "model.mlp_dim": 40,
            "data.global_batch_size": ROWS,
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
        }
        | values
    )


def check(config, **options):
    actual = PipelineUnderTest(config, **options).train(make_batch(ROWS))
    assert_same(actual, reference(config.model, ROWS))


def kept_values(config):
    """Shapes of all that the forward pass hands to the backward pass."""
    subject = PipelineUnderTest(config)
    batch = {name: jax.numpy.asarray(x) for name, x in make_batch(ROWS).items()}

    def residuals(params):
        key = jax.random.key(0)
        return jax.tree.leaves(jax.vjp(lambda p: subject.pipeline.loss(p, batch, key), params)[1])

    return [leaf.shape for leaf in jax.eval_shape(residuals, subject.params)]


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "unroll"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("policy", "flags"),
    [("none", "iterations"), *product(("full", "minimal", "minimal_offloaded"), ("iterations", "layers", "both", "neither"))],
)
def test_no_iteration_keeps_weights(policy, flags, dtype, scan_layers):
    """The forward pass hands on nothing in the shape of a weight but the parameters themselves."""
    config = circular(
        **{
            "pipeline.remat_policy": policy,
            "pipeline.remat_iterations": flags in ("iterations", "both"),
            "pipeline.remat_layers": flags in ("layers", "both"),
            "pipeline.scan_layers_per_stage": scan_layers,
            "model.dtype": dtype,
        }
    )
    weights = {(24, 6, 4), (24, 3, 4), (6, 4, 24), (24, 40), (40, 24)}
    found = [shape for shape in kept_values(config) if any(shape[-len(w) :] == w for w in weights)]
    # One leaf [repeats, stages, layers, ...] of each: query, key, value, out, gate, up, down.
    assert len(found) == 7
    assert {shape[:3] for shape in found} == {(2, 2, 2)}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy):
    check(circular(**{"pipeline.remat_policy": policy}))


def test_a_custom_policy():
    check(circular(**CUSTOM))


@pytest.mark.parametrize("iterations", [True, False])
@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("policy", ["full", "minimal_offloaded"])
def test_rematerialised_iterations_and_layers(policy, layers, iterations):
    flags = {"pipeline.remat_iterations": iterations, "pipeline.remat_layers": layers}
    check(circular(**flags, **{"pipeline.remat_policy": policy}))
