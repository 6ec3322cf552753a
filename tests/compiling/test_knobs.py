"""What idle memory would buy: policies of rematerialisation by the FLOPs they save."""

import pytest

from maxpipe.compiling.knobs import gains
from maxpipe.config import Config, replace, resolve

SIZES = {
    "model.num_layers": 4,
    "model.embed_dim": 64,
    "model.num_query_heads": 4,
    "model.num_kv_heads": 4,
    "model.mlp_dim": 192,
    "model.vocab_size": 512,
    "data.sequence_length": 64,
    "data.global_batch_size": 16,
    "mesh.ici.stage": 2,
    "pipeline.num_repeats": 1,
    "pipeline.num_microbatches": 4,
    "pipeline.remat_policy": "full",
    "eval.every": 0,
}
# As many layers in the pipeline, each with much less work than a dense one.
FIRST = {
    "model.num_layers": 6,
    "model.first_dense_layers": 2,
    "model.moe.experts": 2,
    "model.moe.per_token": 1,
    "model.moe.mlp_dim": 8,
}


def share_without_recomputation(**values):
    """Return the FLOPs of a step with policy `none` over those of `full`, as gains count them."""
    written = replace(Config(), **SIZES | values)
    seen = {}

    def bound(config, flops):
        seen[config.pipeline.remat_policy] = flops
        return 1.0

    gains(
        written,
        resolve(written, 2),
        (2, 1),
        needed=0.0,
        capacity=1e12,
        flops=1.0,
        mfu=0.1,
        bound_mfu=bound,
    )
    return seen["none"]


def layer_flops(mlp):
    """Return the FLOPs of products with weights, and of attention, in a layer's forward."""
    return 2 * 64 * (4 * 64 + mlp), 2 * 64 * 64


@pytest.mark.parametrize(("schedule", "forwards"), [("lockstep_1f1b", 2), ("circular", 1)])
def test_gains_count_first_dense_layers_with_their_own_flops(schedule, forwards):
    """A lockstep engine runs them forward twice; what is computed again is one more forward."""
    weights, attention = layer_flops(3 * 192)
    moe_weights, moe_attention = layer_flops(2 + 3 * 8)  # a router of two, and one expert
    head = 3 * 2 * 64 * 512
    first = 2 * ((forwards + 2) * weights + (forwards + 2) * attention)
    none = first + 4 * (3 * moe_weights + 3 * moe_attention) + head
    full = none + 2 * (weights + attention) + 4 * (moe_weights + moe_attention)
    share = share_without_recomputation(**FIRST, **{"pipeline.schedule": schedule})
    assert share == pytest.approx(none / full)
