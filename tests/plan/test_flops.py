import dataclasses

import pytest
from helpers.engines import tiny

from maxpipe.config.sections import LoRAConfig, MLAConfig, ModelConfig, MoEConfig
from maxpipe.plan.flops import (
    active_parameter_count,
    model_flops_per_token,
    parameter_count,
    trained_parameter_count,
)
from maxpipe.plan.footprint import layer_of
from maxpipe.plan.layer_costs import layer_costs
from maxpipe.plan.layer_trace import trace_model

TINY = ModelConfig(
    num_layers=3,
    embed_dim=8,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=16,
    vocab_size=32,
)


def test_products_in_8_bits_count_as_others():
    quantised = dataclasses.replace(TINY, quantisation="int8", quantised_passes="full")
    assert model_flops_per_token(quantised, 10) == model_flops_per_token(TINY, 10)
    assert trace_model(quantised, 10) is trace_model(TINY, 10)  # not traced again


def test_base_of_adapters_has_two_passes_of_three():
    adapted = dataclasses.replace(TINY, lora=LoRAConfig(rank=2))
    trained = trained_parameter_count(adapted)
    assert trained == parameter_count(adapted) - parameter_count(TINY)
    # 12 L H D T / 2 of attention are as without adapters.
    attention = 6 * TINY.num_layers * TINY.num_query_heads * TINY.head_dim * 10
    of_weights = model_flops_per_token(TINY, 10) - attention
    expected = 2 / 3 * of_weights + attention + 6 * trained
    assert model_flops_per_token(adapted, 10) == pytest.approx(expected)


def count_by_hand(model):
    heads, kv_heads = model.num_query_heads * model.head_dim, model.num_kv_heads * model.head_dim
    embed, mlp = model.embed_dim, model.mlp_dim
    shapes = [
        (embed, heads),
        (embed, kv_heads),
        (embed, kv_heads),
        (heads, embed),
        (embed, mlp),
        (embed, mlp),
        (mlp, embed),
    ]
    return sum(rows * columns for rows, columns in shapes)


def test_parameters_of_a_plain_decoder():
    norms = 3 * 2 * 8 + 8
    assert parameter_count(TINY) == 2 * 32 * 8 + 3 * count_by_hand(TINY) + norms


def test_options_change_the_parameters_and_ties_no_flops():
    for change, difference in (
        ({"tie_embeddings": True}, -32 * 8),
        ({"qk_norm": True}, 3 * 2 * 6),
        ({"attention_bias": True}, 3 * (4 + 2 + 2) * 6),
    ):
        model = dataclasses.replace(TINY, **change)
        assert parameter_count(model) - parameter_count(TINY) == difference
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    assert model_flops_per_token(tied, 64) == model_flops_per_token(TINY, 64)


def test_flops_are_six_per_weight_and_causal_attention():
    weights = 3 * count_by_hand(TINY) + 32 * 8
    scores_and_values = 2 * 2 * 4 * 6 * (64 / 2)
    assert model_flops_per_token(TINY, 64) == 6 * weights + 3 * 3 * scores_and_values


def test_experts_count_in_full_as_parameters_and_as_chosen_in_flops():
    moe = MoEConfig(experts=8, per_token=2, mlp_dim=5, shared_experts=1)
    model = dataclasses.replace(TINY, moe=moe)
    dense, routed, expert = 3 * 8 * TINY.mlp_dim, 8 * 8, 3 * 8 * 5  # of a layer
    difference = 3 * (routed + 9 * expert - dense)
    assert parameter_count(model) - parameter_count(TINY) == difference
    assert parameter_count(model) - active_parameter_count(model) == 3 * 6 * expert
    assert active_parameter_count(TINY) == parameter_count(TINY)
    weights = 3 * (routed + 3 * expert - dense)
    flops = model_flops_per_token(model, 64) - model_flops_per_token(TINY, 64)
    assert flops == 6 * weights


def test_windows_leave_out_the_flops_of_keys_that_no_query_sees():
    """Two of three layers have a window of 16: a triangle, then 16 keys for each query."""
    local = {"layer_pattern": ["local", "local", "global"], "attention_window": 16}
    saved = model_flops_per_token(TINY, 64) - model_flops_per_token(
        dataclasses.replace(TINY, **local), 64
    )
    pairs = 64 * 64 / 2 - (16 * 16 / 2 + 48 * 16)
    assert saved == pytest.approx(3 * 2 * 2 * 2 * 4 * 6 * pairs / 64)


def test_latent_attention_counts_its_products_and_the_widths_of_scores_and_values():
    mla = MLAConfig(
        q_lora_rank=3, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=7
    )
    model = dataclasses.replace(TINY, attention_kind="mla", num_kv_heads=4, mla=mla)
    query, key_value = 8 * 3 + 3 * 4 * (4 + 2), 8 * (5 + 2) + 5 * 4 * (4 + 7)
    layer = query + key_value + 4 * 7 * 8 + 3 * 8 * 16
    norms = 3 * (2 * 8 + 3 + 5) + 8
    assert parameter_count(model) == 2 * 32 * 8 + 3 * layer + norms
    scores_and_values = 2 * 4 * (4 + 2 + 7) * (64 / 2)
    weights = 3 * layer + 32 * 8
    assert model_flops_per_token(model, 64) == 6 * weights + 3 * 3 * scores_and_values


def test_rows_for_others_tokens_count_only_where_a_layer_has_no_second_program():
    words = "expert=4 moe.experts=8 moe.per_token=2 sequence_length=1024 moe.capacity_factor="
    for factor, empty in ((0, 0), (1.25, 3 * 2)):
        config = tiny(f"{words}{factor}")
        others = layer_costs(config, "tpu").rows - layer_of(config).gathered_width
        assert others == empty * config.model.embed_dim
