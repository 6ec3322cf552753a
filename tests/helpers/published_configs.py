"""What config.json of published models says of their shape, by the name of the preset.

The values are those of the files on Hugging Face's hub, of the model that is named with each;
keys that say nothing of the shape are left out.
"""

from typing import Any

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}


def _sizes(layers: int, embed: int, heads: int, mlp: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": embed,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA | _sizes(32, 4096, 32, 14_336),  # meta-llama/Llama-3.1-8B
    "llama3-70b": _LLAMA | _sizes(80, 8192, 64, 28_672),  # meta-llama/Llama-3.1-70B
    "llama3-405b": _LLAMA | _sizes(126, 16_384, 128, 53_248),  # meta-llama/Llama-3.1-405B
    "qwen3-0.6b": _QWEN3  # Qwen/Qwen3-0.6B
    | _sizes(28, 1024, 16, 3072)
    | {"tie_word_embeddings": True, "max_window_layers": 28},
    "qwen3-8b": _QWEN3  # Qwen/Qwen3-8B
    | _sizes(36, 4096, 32, 12_288)
    | {"tie_word_embeddings": False, "max_window_layers": 36},
    "qwen3-30b-a3b": _QWEN3  # Qwen/Qwen3-30B-A3B
    | _sizes(48, 2048, 32, 6144)
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen2.5-7b": _sizes(28, 3584, 28, 18_944)  # Qwen/Qwen2.5-7B
    | {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000.0,
        "sliding_window": 131_072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    "mistral-7b": _sizes(32, 4096, 32, 14_336)  # mistralai/Mistral-7B-Instruct-v0.2
    | {
        "model_type": "mistral",
        "vocab_size": 32_000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": _sizes(32, 4096, 32, 14_336)  # mistralai/Mixtral-8x7B-v0.1
    | {
        "model_type": "mixtral",
        "vocab_size": 32_000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _sizes(24, 2880, 64, 2880)  # openai/gpt-oss-20b
    | {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "initial_context_length": 4096,
        "rms_norm_eps": 1e-05,
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150_000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "tie_word_embeddings": False,
    },
    # deepseek-ai/DeepSeek-V3, without the yarn by which its context was extended after training.
    "deepseek-v3": _sizes(61, 7168, 128, 18_432)
    | {
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_theta": 10_000,
        "tie_word_embeddings": False,
    },
    "smollm3-3b": _sizes(36, 2048, 16, 11_008)  # HuggingFaceTB/SmolLM3-3B
    | {
        "model_type": "smollm3",
        "vocab_size": 128_256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "mlp_bias": False,
        "layer_types": ["full_attention"] * 36,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "rope_theta": 5_000_000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "phi4-14b": _sizes(40, 5120, 40, 17_920)  # microsoft/phi-4
    | {
        "model_type": "phi3",
        "vocab_size": 100_352,
        "num_key_value_heads": 10,
        "max_position_embeddings": 16_384,
        "original_max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "rope_theta": 250_000,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gemma2-9b": _sizes(42, 3584, 16, 14_336)  # google/gemma-2-9b
    | {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
    },
    # google/gemma-3-27b-pt, whose text part leaves out what its class sets.
    "gemma3-27b": {
        "model_type": "gemma3",
        "text_config": _sizes(62, 5376, 32, 21_504)
        | {
            "model_type": "gemma3_text",
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "olmo2-7b": _sizes(32, 4096, 32, 11_008)  # allenai/OLMo-2-1124-7B
    | {
        "model_type": "olmo2",
        "vocab_size": 100_352,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "rope_theta": 500_000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "olmo3-7b": _sizes(32, 4096, 32, 11_008)  # allenai/Olmo-3-7B-Instruct
    | {
        "model_type": "olmo3",
        "vocab_size": 100_278,
        "num_key_value_heads": 32,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "rope_theta": 500_000,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "granite3.3-8b": _sizes(40, 4096, 32, 12_800)  # ibm-granite/granite-3.3-8b-instruct
    | {
        "model_type": "granite",
        "vocab_size": 49_159,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10_000_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
}
