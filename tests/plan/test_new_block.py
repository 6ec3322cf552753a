"""A block that is only in the catalogue is priced right: parameters, FLOPs, MFU, memory, stages."""

import jax
import pytest
from flax import nnx
from helpers.engines import keys, make_mesh
from jax.ad_checkpoint import checkpoint_name

from maxpipe.config import Config, catalog, replace, resolve
from maxpipe.config.sections import ModelConfig
from maxpipe.devices.chips import chip_for
from maxpipe.model.attention import AttentionFn
from maxpipe.model.block import LlamaBlock
from maxpipe.model.layers import GatedMLP, RMSNorm, SideInputs, project
from maxpipe.model.parameters import declare
from maxpipe.model.program import ModelProgram
from maxpipe.plan.auto_stages import predict
from maxpipe.plan.estimate import estimate
from maxpipe.plan.flops import model_flops_per_token, parameter_count
from maxpipe.plan.footprint import layer_of
from maxpipe.plan.layer_costs import saving_of
from maxpipe.plan.layer_times import layer_times
from maxpipe.training import phases

D, MLP, T, LAYERS = 64, 96, 32, 4
# Weights that the block has and the Llama block has not: a gated MLP, and D -> 4 D -> D.
MORE_WEIGHTS = 3 * D * MLP + 8 * D * D


class WideBlock(LlamaBlock):
    """The Llama block with a second MLP, and an ungated layer of four times the width after it."""

    def __init__(self, config: ModelConfig, attention: AttentionFn):
        super().__init__(config, attention)
        width = config.embed_dim
        self.second_norm = RMSNorm(width, eps=config.norm_eps, dtype=config.param_dtype)
        self.second_mlp = GatedMLP(config)
        self.wide_in = declare((width, 4 * width), ("embed", "mlp"), config.param_dtype, stddev=0.1)
        self.wide_out = declare(
            (4 * width, width), ("mlp", "embed"), config.param_dtype, stddev=0.1
        )

    def __call__(
        self, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        x_BTD, auxiliary = super().__call__(x_BTD, side, key)
        x_BTD = x_BTD + self.second_mlp(self.second_norm(x_BTD))
        wide = checkpoint_name(project(x_BTD, self.wide_in[...]), "wide")
        return x_BTD + project(nnx.silu(wide), self.wide_out[...]), auxiliary


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    monkeypatch.setitem(catalog.BLOCKS, "wide", catalog.Block(f"{__name__}:WideBlock"))
    policy = catalog.RematPolicy(device=("wide", "mlp_down"))
    monkeypatch.setitem(catalog.REMAT_POLICIES, "save_wide", policy)


def config_of(block="wide", **values):
    small = keys(
        f"block={block} num_layers={LAYERS} embed_dim={D} mlp_dim={MLP} vocab_size=512 "
        f"num_query_heads=4 num_kv_heads=2 sequence_length={T} global_batch_size=16 "
        "num_microbatches=4 schedule=lockstep_1f1b stage=2 fsdp=2 tensor=2"
    )
    return resolve(replace(Config(), **small | {"eval.every": 0} | values), 8)


def both(function):
    return function(config_of()), function(config_of("llama"))


def test_parameters_and_model_flops_follow_the_block():
    new, llama = both(lambda config: parameter_count(config.model))
    assert new - llama == LAYERS * (MORE_WEIGHTS + D)  # and a norm
    assert new == ModelProgram(config_of().model).parameter_count()
    new, llama = both(lambda config: model_flops_per_token(config.model, T))
    assert new - llama == 6 * LAYERS * MORE_WEIGHTS


def test_mfu_follows_the_block_through_the_run(monkeypatch):
    chip = chip_for("TPU v5")
    monkeypatch.setattr(phases, "chip_for", lambda kind: chip)
    mesh = make_mesh(config_of())
    wide, llama = (phases.peak_seconds(config_of(block), mesh) for block in ("wide", "llama"))
    more = 16 * T * 6 * LAYERS * MORE_WEIGHTS
    assert wide - llama == pytest.approx(more / (chip.peak_flops["float32"] * mesh.size))


def test_activations_and_stash_grow_with_the_block():
    new, llama = both(lambda config: estimate(config, None).activations)
    assert new > 1.3 * llama
    new, llama = both(lambda config: saving_of(config).stash)
    # Full rematerialisation on one of two tensor shards: gradients of the second MLP's hidden
    # values (one for gate and up) and output, of its norm, of `wide` and its output; and what is
    # recomputed of these to make operands.
    gradients = MLP / 2 + D + D + 4 * D / 2 + D
    recomputed = 2 * MLP / 2 + D + 4 * D / 2 + D
    assert new - llama == gradients + recomputed


def test_times_of_stages_follow_the_block():
    new, llama = both(layer_times)
    layer = layer_of(config_of("llama"))
    forward = layer.weight_flops + layer.activation_flops
    assert llama.head / new.head == pytest.approx((forward + 2 * MORE_WEIGHTS) / forward)
    assert predict(config_of(), [1, 1, 1, 1]).times == new


def test_a_saved_tensor_of_the_block_is_not_recomputed():
    layer = layer_of(config_of())
    everything = layer.recomputed_flops(())
    assert everything - layer.recomputed_flops(("wide",)) == 2 * 4 * D * D
    assert layer.saved_width(("wide",)) == 4 * D / 2
