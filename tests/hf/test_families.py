"""config.json of each model type: both dialects, defaults, and back again."""

import copy
import dataclasses
import re

import pytest
from helpers.hf_models import CASES, LENGTH, recorded
from helpers.hf_parameters import config_from, family_of

from maxpipe.hf.rope import rope_conflicts

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
# Where files of the hub, which transformers 4 wrote, have a key of the newer dialect
LEGACY = {
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "llama": {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "phi3": {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
    "phi3_longrope_long": {
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 4.0, 8.0],
        },
    },
}


def resolved(name, c, **options):
    return config_from(name, c, **options).model


def test_both_dialects_mean_the_same_model():
    for name, keys in LEGACY.items():
        c = copy.deepcopy(recorded(name)["config"])
        del c["rope_parameters"]
        c.pop("partial_rotary_factor", None)
        expected = family_of(name).model(recorded(name)["config"])
        assert family_of(name).model(c | keys) == expected, name


def test_kinds_of_layers_follow_the_rule_of_the_type_where_none_are_listed():
    for name in ("gemma2", "gemma3", "olmo3", "smollm3", "qwen2_windows"):
        c = copy.deepcopy(recorded(name)["config"])
        listed = family_of(name).model(c)
        for key in ("layer_types", "no_rope_layers", "_sliding_window_pattern"):
            c.pop(key, None)
        assert family_of(name).model(c) == listed, name
        assert listed["layer_pattern"], name


def test_keys_that_are_absent_have_the_defaults_of_the_type():
    c = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = family_of("gemma3").model(c)
    expected = {
        "num_query_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "tie_embeddings": True,
        "attention_window": 1024,
        "layer_pattern": ["local"] * 5 + ["global"],
        "rope_theta": 1e6,
        "rope_theta_local": 1e4,
        "rope_scaling.type": "linear",
        "rope_scaling.factor": 8.0,
        "mlp_activation": "gelu_tanh",
        "query_scale": 1 / 16,
        "qk_norm": True,
    }
    assert {key: values[key] for key in expected} == expected


def test_config_json_that_is_written_means_the_same_model_in_either_dialect():
    for name, (model_type, _) in CASES.items():
        model = resolved(name, recorded(name)["config"])
        written = family_of(name).config(model, LENGTH)
        assert written["model_type"] == model_type
        assert resolved(name, written) == model, name
        del written["rope_parameters"]
        assert resolved(name, written) == model, name


def test_option_without_a_word_in_the_type_is_refused_by_its_name():
    for name, key, value in (
        ("llama", "attention_window", 8),
        ("llama", "logit_soft_cap", 30.0),
        ("qwen3", "qk_norm", False),
        ("gemma2", "query_scale", 0.3),
        ("gemma3", "attention_soft_cap", 5.0),
        ("olmo2", "norm_placement", "pre"),
        ("llama", "rope_fraction", 0.5),
    ):
        model = resolved(name, recorded(name)["config"], **{key: value})
        message = f"{CASES[name][0]} has no model.{key}={value}"
        with pytest.raises(ValueError, match=re.escape(message)):
            family_of(name).config(model, LENGTH)


def test_what_no_option_expresses_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1.0}
    for name, change, message in (
        ("llama", {"hidden_act": "relu"}, "'relu' is no option"),
        ("llama", {"rope_parameters": rope}, "rope_type 'dynamic'"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias true"),
        # transformers applies none
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "has layers without experts"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}, "layer_interval is 0"),
    ):
        c = {k: v for k, v in (recorded(name)["config"] | change).items() if v is not None}
        with pytest.raises(ValueError, match=re.escape(message)):
            family_of(name).model(c)


def test_bias_that_training_updates_is_exported_as_one():
    model = resolved("deepseek_v3", recorded("deepseek_v3")["config"])
    moe = dataclasses.replace(model.moe, selection_bias=False, bias_rate=1e-3)
    trained = dataclasses.replace(model, moe=moe)
    family = family_of("deepseek_v3")
    assert family.config(trained, LENGTH) == family.config(model, LENGTH)


def test_rotation_with_two_places_is_that_of_transformers_which_is_said():
    """Values are those of transformers 5.24, most of them also those of 4.57."""
    length = {"original_max_position_embeddings": 64}
    for changes, expected, line in (
        ({}, {"type": "yarn", "original_max_position": 32, "beta_fast": 32}, ""),
        ({"rope_scaling": YARN | {"factor": 4.0}}, {"factor": 4.0}, "rope_scaling counts"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"type": "linear"}, "counts"),
        ({"rope_scaling": YARN}, {"factor": 8.0}, ""),
        (length, {"original_max_position": 64}, "original_max_position_embeddings outside"),
    ):
        c = recorded("llama")["config"] | {"rope_parameters": YARN} | changes
        values = family_of("llama").model(c)
        assert {name: values[f"rope_scaling.{name}"] for name in expected} == expected
        lines = rope_conflicts(c)
        assert len(lines) == bool(line)
        assert all(line in text for text in lines)
