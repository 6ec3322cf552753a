"""Changes that save memory, and what idle memory would buy, by the FLOPs that it saves."""

import pytest

from maxpipe.compile.knobs import gains, knobs
from maxpipe.config import Config, replace, resolve
from maxpipe.devices.chips import GIB, Tpu
from maxpipe.plan.choices import with_gather_mode
from maxpipe.plan.estimate import estimate

POLICY = "pipeline.remat_policy"
SIZES = {"model.num_layers": 4, "model.embed_dim": 64, "model.mlp_dim": 192}
SIZES |= {"model.num_query_heads": 4, "model.num_kv_heads": 4, "model.vocab_size": 512}
SIZES |= {"data.sequence_length": 64, "data.global_batch_size": 16, "eval.every": 0}
STAGES = {"mesh.ici.stage": 2, "pipeline.num_repeats": 1, "pipeline.num_microbatches": 4}
STAGES |= {"pipeline.schedule": "lockstep_1f1b", POLICY: "full"}
WRITTEN = replace(Config(), **SIZES, **STAGES)


def test_knobs_are_legal_and_save_what_they_say():
    written = replace(WRITTEN, **{"pipeline.schedule": "circular", POLICY: "none"})
    resolved = resolve(written, 2)
    found = knobs(written, resolved, (2, 1), None)
    words = [knob.words for knob in found]
    assert f"{POLICY}=full" in words
    assert "pipeline.schedule=lockstep_1f1b pipeline.engine=auto" in words
    assert [knob.saves for knob in found] == sorted((knob.saves for knob in found), reverse=True)
    full = resolve(replace(written, **{POLICY: "full"}), 2)
    saved = next(knob.saves for knob in found if knob.words == f"{POLICY}=full")
    assert saved == pytest.approx(estimate(resolved, None).total - estimate(full, None).total)


def gains_of(written, bound_mfu, devices=2, capacity=95 * GIB, tpu=None):
    resolved = with_gather_mode(resolve(written, devices), tpu)
    memory = estimate(resolved, tpu).total, capacity
    return gains(written, resolved, (devices, 1), tpu, memory, bound_mfu)


def test_gains_save_more_fit_and_are_faster():
    best = gains_of(WRITTEN, lambda config, share: 0.25 / share)[0]
    assert best.words == f"{POLICY}=minimal"
    minimal = resolve(replace(WRITTEN, **{POLICY: "minimal"}), 2)
    assert best.needed == pytest.approx(estimate(minimal, None).total)
    # Three of four passes are left; attention and the head count too.
    assert 0.25 < best.mfu < 0.25 * 4 / 3
    # What does not fit, or is not faster, is left out.
    full = 1.01 * estimate(resolve(WRITTEN, 2), None).total
    assert gains_of(WRITTEN, lambda config, share: 0.25 / share, capacity=full) == []
    assert gains_of(WRITTEN, lambda config, share: 0.25) == []


def layer_flops(mlp):
    return 2 * 64 * (4 * 64 + mlp) + 2 * 64 * 64


def test_gains_count_first_dense_layers_with_their_own_flops():
    """A lockstep engine runs them forward twice; what is computed again is one more forward."""
    moe = {"model.moe.experts": 2, "model.moe.per_token": 1, "model.moe.mlp_dim": 8}
    written = replace(WRITTEN, **{"model.num_layers": 6, "model.first_dense_layers": 2, **moe})
    seen = {}

    def bound(config, share):
        seen[config.pipeline.remat_policy] = share
        return 1.0

    gains_of(written, bound)
    dense, sparse = layer_flops(3 * 192), layer_flops(2 + 3 * 8)  # a router of two, and one expert
    none = 2 * (2 + 2) * dense + 4 * 3 * sparse + 3 * 2 * 64 * 512
    assert seen["none"] == pytest.approx(none / (none + 2 * dense + 4 * sparse))


def test_gains_unroll_a_loop_over_layers_on_tpus():
    sequential = {"mesh.ici.stage": 1, "pipeline.engine": "sequential"}
    written = replace(WRITTEN, **sequential | {"pipeline.scan_layers": True})
    for tpu, words, compiles in (
        (Tpu(95 * 2.0**30, 8), f"{POLICY}=none pipeline.scan_layers=false", "compiles all 4 layer"),
        (None, f"{POLICY}=none", ""),
    ):
        found = gains_of(written, lambda config, share: 1 / share, 1, tpu=tpu)
        assert words in [gain.words for gain in found if gain.compiles.startswith(compiles)]
