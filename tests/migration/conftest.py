"""A small MaxText installation: base.yml, two models' files, and translations of its words."""

import pytest

from maxpipe.config import ConfigError
from maxpipe.migration.configuration import translate
from maxpipe.migration.read import read_maxtext

BASE = """\
run_name: ""
model_name: "default"
base_emb_dim: 2048
num_experts: 1
mlp_activations: ["silu", "linear"]
quantization: ""
weight_block_size: null
remat_policy: 'full'
max_num_checkpoints_to_keep: None
use_iota_embed: false
learning_rate: 3e-5
"""
MODELS = {  # by name
    "llama3-8b": (
        "{base_emb_dim: 4096, base_num_query_heads: 32, base_num_kv_heads: 8, "
        "base_num_decoder_layers: 32, base_mlp_dim: 14336, head_dim: 128, vocab_size: 128256, "
        "enable_dropout: false, rope_max_timescale: 500_000, decoder_block: llama2}"
    ),
    "llama3.1-8b": "{decoder_block: llama2}",
    "gemma2-9b": (
        "{base_emb_dim: 3584, base_num_query_heads: 16, base_num_kv_heads: 8, base_mlp_dim: "
        "14336, base_num_decoder_layers: 21, head_dim: 256, mlp_activations: [gelu,linear], "
        "vocab_size: 256128, decoder_block: gemma2, normalization_layer_epsilon: 1.e-06, "
        "logits_via_embedding: true, final_logits_soft_cap: 30.0, attn_logits_soft_cap: 50.0, "
        "sliding_window_size: 4096, use_post_attn_norm: true, use_post_ffw_norm: true}"
    ),
    "mixtral-8x7b": (
        "{base_emb_dim: 4096, base_num_query_heads: 32, base_num_kv_heads: 8, base_mlp_dim: "
        "14336, base_moe_mlp_dim: 14336, base_num_decoder_layers: 32, mlp_activations: [silu, "
        "linear], num_experts: 8, num_experts_per_tok: 2, decoder_block: mixtral}"
    ),
    "qwen3-30b-a3b": (
        "{decoder_block: qwen3_moe, base_emb_dim: 2048, base_mlp_dim: 768, base_num_query_heads: "
        "32, base_num_kv_heads: 4, base_num_decoder_layers: 48, use_qk_norm: true, num_experts: "
        "128, num_experts_per_tok: 8, base_moe_mlp_dim: 768, norm_topk_prob: true}"
    ),
    "qwen3-0.6b": (
        "{base_emb_dim: 1024, base_num_query_heads: 16, base_num_kv_heads: 8, base_mlp_dim: 3072, "
        "base_num_decoder_layers: 28, vocab_size: 151936, decoder_block: qwen3, "
        "normalization_layer_epsilon: 1.0e-6, rope_max_timescale: 1000000, use_qk_norm: true, "
        "logits_via_embedding: true, normalize_embedding_logits: false}"
    ),
}


@pytest.fixture
def installed(tmp_path):
    """Path of base.yml; the models' files lie next to it in `models`."""
    (tmp_path / "models").mkdir()
    for name, text in MODELS.items():
        (tmp_path / "models" / f"{name}.yml").write_text(text)
    base = tmp_path / "base.yml"
    base.write_text(BASE)
    return base


@pytest.fixture
def translated(installed):
    """translated("key=value", ..., devices=8) -> Translation."""

    def _translated(*words, devices=8):
        return translate(read_maxtext([str(installed)], words), devices)

    return _translated


@pytest.fixture
def refused(translated):
    """refused("key=value", ..., devices=8) -> {key: message} of what stands in the way."""

    def _refused(*words, devices=8):
        with pytest.raises(ConfigError) as caught:
            translated(*words, devices=devices)
        return {problem.key: problem.message for problem in caught.value.problems}

    return _refused
