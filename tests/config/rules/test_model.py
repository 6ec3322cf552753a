"""Rules about the model's shape, logical axes and context parallelism."""

import pytest

from maxpipe.config import catalog


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (
            ("model.num_query_heads=6",),
            "model.num_kv_heads",
            "does not divide model.num_query_heads=6; legal are 1, 2, 3, 6",
        ),
        (
            ("model.embed_dim=66",),
            "model.embed_dim",
            "not divisible by model.num_query_heads=4; nearest legal: 64 or 68",
        ),
        (("model.head_dim=15",), "model.head_dim", "must be even"),
        (
            ("model.lora.rank=4", "model.lora.targets=[query, valeu]"),
            "model.lora.targets",
            "'valeu' is not one of query, key, value, out, gate, up, down, all-linear; did you "
            "mean value?",
        ),
        (("model.lora.targets=[query]",), "model.lora.targets", "has no effect with model.lora."),
        (("model.lora.rank=4", "model.lora.targets=word"), "model.lora.targets", "'word' is not"),
        (("model.lora.rank=4", "model.lora.targets=[]"), "model.lora.targets", "names none of"),
        (
            ("model.lora.rank=4", "model.lora.targets=[query, up]", "model.moe.experts=4"),
            "model.lora.targets",
            "experts have no adapters: leave out up, or use [all-linear]",
        ),
        (
            ("model.lora.rank=65", "model.num_kv_heads=1"),
            "model.lora.rank",
            "65 is above 16, the rank of the projection key itself; use at most 16",
        ),
        (
            ("model.lora.rank=4", "model.attention_kind=mla"),
            "model.lora.rank",
            "model.attention_kind=mla has no adapters",
        ),
        (
            ("model.quantisation=int4",),
            "model.quantisation",
            "'int4' is not one of none, int8, fp8; did you mean int8?",
        ),
        (
            ("model.quantised_passes=full",),
            "model.quantised_passes",
            "has no effect with model.quantisation=none; set model.quantisation too",
        ),
        (
            ("model.quantisation=fp8", "model.moe.experts=4"),
            "model.quantisation",
            "fp8 is not possible with model.moe.experts=4, since no kernel of experts",
        ),
        (("model.embed_dim=4",), "model.head_dim", "must be even"),
        (
            ("mesh.ici.expert=2",),
            "mesh.ici.expert",
            "2 devices have no experts to share; use 1 and mesh.ici.fsdp=2, or set "
            "model.moe.experts",
        ),
        (
            ("mesh.ici.expert=4", "model.moe.experts=6"),
            "mesh.ici.expert",
            "4 devices do not divide model.moe.experts=6; use 2 or 3 or 6",
        ),
        (
            ("mesh.ici.expert=2", "model.moe.experts=1", "model.moe.per_token=1"),
            "mesh.ici.expert",
            "2 devices do not divide model.moe.experts=1; use 1",
        ),
        (
            (
                "mesh.ici.expert=2",
                "model.moe.experts=4",
                "sharding.logical_axis_rules=[[activation_batch, [data, fsdp]]]",
            ),
            "sharding.logical_axis_rules",
            "use [activation_batch, [data, fsdp, expert]]",
        ),
        (
            ("model.moe.experts=4", "sharding.logical_axis_rules=[[expert, [fsdp]]]"),
            "sharding.logical_axis_rules",
            "experts can only be split over mesh axis expert; use [expert, [expert]]",
        ),
        (
            ("mesh.ici.expert=2", "model.moe.experts=4", "data.global_batch_size=9"),
            "data.global_batch_size",
            "9 is not divisible by num_microbatches x data x fsdp x expert = 2 x 1 x 2 x 2 = 8",
        ),
        (
            ("mesh.ici.context=2", "mesh.dcn.context=3", "data.sequence_length=100"),
            "data.sequence_length",
            "100 is not divisible by 2 x mesh.*.context = 12; nearest legal: 96 or 108",
        ),
        (
            (
                "mesh.ici.context=2",
                "sharding.logical_axis_rules=[[activation_length, [context, tensor]]]",
            ),
            "sharding.logical_axis_rules",
            "activation_length lies over ['context', 'tensor']; use [activation_length, [context]]",
        ),
        (("mesh.dcn.expert=2",), "mesh.dcn.expert", "have no experts to share"),
        (
            ("model.moe.experts=4", "model.moe.per_token=5"),
            "model.moe.per_token",
            "5 is more than model.moe.experts=4",
        ),
        (
            ("model.moe.experts=4", "model.moe.capacity_factor=1.5", "mesh.ici.context=2"),
            "model.moe.capacity_factor",
            "1.5 counts the tokens of whole sequences, which mesh.ici.context=2 splits; use 0",
        ),
        (
            ("model.moe.balance_loss=0.01",),
            "model.moe.balance_loss",
            "0.01 has no effect without experts; set model.moe.experts",
        ),
        (
            ("model.moe.experts=4", "model.moe.router=topk_softmax", "model.moe.normalise=false"),
            "model.moe.normalise",
            "weights of model.moe.router=topk_softmax add up to 1; use true",
        ),
        (
            ("model.mla.kv_lora_rank=64",),
            "model.mla.kv_lora_rank",
            "64 has no effect with model.attention_kind=gqa; set model.attention_kind=mla",
        ),
        (
            ("model.attention_kind=mla", "model.num_kv_heads=2"),
            "model.num_kv_heads",
            "every query head has a key of its own; use 4",
        ),
        (
            ("model.attention_kind=mla", "model.head_dim=64"),
            "model.head_dim",
            "64 is not model.mla.qk_nope_head_dim + qk_rope_head_dim = 192",
        ),
        (
            ("model.attention_kind=mla", "model.attention_sinks=true"),
            "model.attention_sinks",
            "True is no option of model.attention_kind=mla",
        ),
        (
            ("model.attention_kind=mla", "model.mla.qk_rope_head_dim=3"),
            "model.mla.qk_rope_head_dim",
            "must be even",
        ),
        (
            ("model.moe.experts=8", "model.moe.groups=3"),
            "model.moe.groups",
            "3 does not divide model.moe.experts=8",
        ),
        (
            ("model.moe.experts=8", "model.moe.groups=4", "model.moe.groups_per_token=5"),
            "model.moe.groups_per_token",
            "5 is more than model.moe.groups=4",
        ),
        (
            ("model.moe.experts=8", "model.moe.groups=4", "model.moe.per_token=3"),
            "model.moe.groups_per_token",
            "1 of 4 groups have 2 experts, fewer than model.moe.per_token=3",
        ),
        (
            ("model.moe.experts=4", "model.moe.router=topk_softmax", "model.moe.bias_rate=1e-3"),
            "model.moe.bias_rate",
            "model.moe.router=topk_softmax does not take it; use router sigmoid or softmax",
        ),
        (
            ("model.moe.experts=4", "model.moe.router=topk_softmax", "model.moe.groups=2"),
            "model.moe.groups",
            "model.moe.router=topk_softmax does not take it; use router sigmoid or softmax",
        ),
        (
            (
                "model.moe.experts=4",
                "model.moe.router=topk_softmax",
                "model.moe.groups_per_token=2",
            ),
            "model.moe.groups_per_token",
            "model.moe.router=topk_softmax does not take it; use router sigmoid or softmax",
        ),
        (("model.moe.experts=-1",), "model.moe.experts", "-1"),
        (("model.moe.router=top2",), "model.moe.router", "softmax, topk_softmax"),
        (
            ("model.rope_scaling.factor=8", "model.rope_scaling.low_freq_factor=4"),
            "model.rope_scaling.low_freq_factor",
            "less than model.rope_scaling.high_freq_factor=4.0",
        ),
        (
            (
                "model.rope_scaling.type=yarn",
                "model.rope_scaling.factor=8",
                "model.rope_scaling.beta_slow=32",
            ),
            "model.rope_scaling.beta_slow",
            "less than model.rope_scaling.beta_fast=32.0",
        ),
        (
            ("model.rope_scaling.type=longrope", "model.rope_scaling.short_factor=[1, 2]"),
            "model.rope_scaling.short_factor",
            "a positive number for each of 8 rotated pairs of channels; got 2 numbers",
        ),
        (("model.rope_fraction=0.2",), "model.rope_fraction", "are 3 channels, but"),
        (
            ("model.layer_pattern=[local, globl]", "model.attention_window=4"),
            "model.layer_pattern",
            "'globl' is not one of global, local, global_nope, local_nope; did you mean global?",
        ),
        (
            ("model.layer_pattern=[local, global]",),
            "model.layer_pattern",
            "has local layers, which need model.attention_window",
        ),
        (
            ("model.layer_pattern=[global, global_nope]", "model.attention_window=4"),
            "model.attention_window",
            "4 has no effect, since model.layer_pattern has no local layer",
        ),
    ],
)
def test_rule_refuses(problems, words, key, message):
    assert message in problems(*words)[key]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[[embed, [fsdp, fsdp]]]", "uses a mesh axis twice"),
        ("[[embed, [fsdp]], [embed, []]]", "'embed' has more than one rule"),
        ("[[embed, [fdsp]]]", "there is no mesh axis 'fdsp'; did you mean fsdp?"),
        ("[[embed]]", "is not of the form [logical axis, [mesh axes]]"),
        ("[embed]", "is not of the form"),
        ("[[embed, fsdp]]", "is not of the form"),
        ("[[[embed], [fsdp]]]", "is not of the form"),
    ],
)
def test_logical_axis_rules_malformed_are_refused(problems, rules, message):
    assert (
        message in problems(f"sharding.logical_axis_rules={rules}")["sharding.logical_axis_rules"]
    )


def test_quantisation_of_a_block_that_does_not_quantise_is_refused(problems, monkeypatch):
    monkeypatch.setitem(catalog.BLOCKS, "plain", catalog.Block("a.module:Plain"))
    words = ("model.quantisation=int8", "model.block=plain")
    assert (
        "does not quantise; use none, or model.block=llama"
        in problems(*words)["model.quantisation"]
    )
    monkeypatch.setitem(catalog.BLOCKS, "plain", catalog.Block("a.module:Plain", quantises=True))
    assert not problems(*words)


def test_head_dim_is_derived_unless_set(resolved):
    assert resolved().model.head_dim == 16
    assert resolved("model.embed_dim=66", "model.head_dim=32").model.head_dim == 32


def test_longrope_takes_the_list_for_the_length_of_sequences(resolved):
    lists = [f"model.rope_scaling.{n}_factor=[{', '.join(['2'] * 8)}]" for n in ("short", "long")]
    words = ["model.rope_scaling.type=longrope", *lists]
    lengths = [
        resolved(*words, f"data.sequence_length={n}").model.rope_scaling.length
        for n in (8192, 8200)
    ]
    assert lengths == ["short", "long"]
    # Without longrope the key stays what checkpoints of earlier versions take it for.
    assert resolved().model.rope_scaling.length == "auto"
