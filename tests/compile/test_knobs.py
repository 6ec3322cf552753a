"""What idle memory would buy: policies of rematerialisation by the FLOPs they save."""

import pytest

from maxpipe.compile.knobs import gains
from maxpipe.config import Config, replace, resolve
from maxpipe.devices.chips import Tpu
from maxpipe.plan.gather_mode import with_gather_mode

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


def gains_of(written, devices, tpu, bound_mfu):
    """Return the gains of a configuration on devices that have room for any of them."""
    return gains(
        written,
        with_gather_mode(resolve(written, devices), tpu),
        (devices, 1),
        needed=0.0,
        capacity=1e12,
        tpu=tpu,
        flops=1.0,
        mfu=0.1,
        bound_mfu=bound_mfu,
    )


def share_without_recomputation(**values):
    """Return the FLOPs of a step with policy `none` over those of `full`, as gains count them."""
    written = replace(Config(), **SIZES | values)
    seen = {}

    def bound(config, flops):
        seen[config.pipeline.remat_policy] = flops
        return 1.0

    gains_of(written, 2, None, bound)
    return seen["none"]


def layer_flops(mlp):
    """Return the FLOPs of products with weights, and of attention, in a layer's forward."""
    return 2 * 64 * (4 * 64 + mlp), 2 * 64 * 64


def test_gains_count_first_dense_layers_with_their_own_flops():
    """A lockstep engine runs them forward twice; what is computed again is one more forward."""
    forwards = 2
    weights, attention = layer_flops(3 * 192)
    moe_weights, moe_attention = layer_flops(2 + 3 * 8)  # a router of two, and one expert
    head = 3 * 2 * 64 * 512
    first = 2 * ((forwards + 2) * weights + (forwards + 2) * attention)
    none = first + 4 * (3 * moe_weights + 3 * moe_attention) + head
    full = none + 2 * (weights + attention) + 4 * (moe_weights + moe_attention)
    share = share_without_recomputation(**FIRST, **{"pipeline.schedule": "lockstep_1f1b"})
    assert share == pytest.approx(none / full)


V5P = Tpu(95 * 2.0**30, 8)
POLICY = "pipeline.remat_policy"


def test_gains_unroll_a_loop_over_layers_on_tpus():
    sequential = {"mesh.ici.stage": 1, "pipeline.engine": "sequential"}
    written = replace(Config(), **SIZES | sequential | {"pipeline.scan_layers": True})
    for tpu, words, compiles in (
        (V5P, f"{POLICY}=none pipeline.scan_layers=false", "compiles all 4 layers"),
        (None, f"{POLICY}=none", ""),
    ):
        found = gains_of(written, 1, tpu, lambda config, flops: 1 / flops)
        assert (words, compiles) in [(gain.words, gain.compiles) for gain in found]
