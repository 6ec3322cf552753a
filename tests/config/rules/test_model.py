"""Rules about the model's shape, logical axes and context parallelism."""

from maxpipe.config import catalog

# Words -> key: remedies or reasons.
REFUSED = """\
model.num_query_heads=6 -> model.num_kv_heads: legal are 1, 2, 3, 6
model.embed_dim=66 -> model.embed_dim: nearest legal: 64 or 68
model.head_dim=15 -> model.head_dim: must be even
model.rope_fraction=0.2 -> model.rope_fraction: rotates 3 channels
model.lora.targets=[query] -> model.lora.targets: needs model.lora.rank
model.lora.rank=4 model.lora.targets=[] -> model.lora.targets: names none of
model.lora.rank=4 model.lora.targets=[key,up] model.moe.experts=4 -> model.lora.targets: out up
model.lora.rank=4 model.attention_kind=mla -> model.lora.rank: needs model.attention_kind=gqa
model.quantised_passes=full -> model.quantised_passes: needs model.quantisation=int8 or f
model.quantisation=fp8 model.moe.experts=4 -> model.quantisation: needs model.moe.experts=0
model.moe.balance_loss=0.01 -> model.moe.balance_loss: needs model.moe.experts
model.mla.kv_lora_rank=64 -> model.mla.kv_lora_rank: needs model.attention_kind=mla
model.attention_kind=mla model.num_kv_heads=2 -> model.num_kv_heads: model.attention_kind=mla; use 4
model.attention_kind=mla model.head_dim=64 -> model.head_dim: qk_nope_head_dim + qk_rope_head_dim =
    192
model.attention_kind=mla model.attention_sinks=true -> model.attention_sinks:
    model.attention_kind=gqa
model.attention_kind=mla model.mla.qk_rope_head_dim=3 -> model.mla.qk_rope_head_dim: must be even
mesh.ici.expert=2 -> mesh.ici.expert: use 1 and mesh.ici.fsdp=2, or set model.moe.experts
mesh.ici.expert=4 model.moe.experts=6 -> mesh.ici.expert: use 2 or 3 or 6
mesh.ici.expert=2 model.moe.experts=4 sharding.logical_axis_rules=[[activation_batch,[data,fsdp]]]
    -> sharding.logical_axis_rules: use [activation_batch, [data, fsdp, expert]]
model.moe.experts=4 sharding.logical_axis_rules=[[expert,[fsdp]]] -> sharding.logical_axis_rules:
    use [expert, [expert]]
mesh.ici.expert=2 model.moe.experts=4 data.global_batch_size=9 -> data.global_batch_size:
    num_microbatches x fsdp x expert = 2 x 2 x 2 = 8
model.moe.experts=4 model.moe.per_token=5 -> model.moe.per_token: more than model.moe.experts=4
model.moe.experts=4 model.moe.capacity_factor=1.5 mesh.ici.context=2 -> model.moe.capacity_factor:
    needs mesh.ici.context=1
model.moe.experts=4 model.moe.router=topk_softmax model.moe.normalise=false -> model.moe.normalise:
    router=topk_softmax, only with
model.moe.experts=8 model.moe.groups=3 -> model.moe.groups: 3 does not divide model.moe.e
model.moe.experts=8 model.moe.groups=4 model.moe.groups_per_token=5 -> model.moe.groups_per_token:
    more than model.moe
model.moe.experts=8 model.moe.groups=4 model.moe.per_token=3 -> model.moe.groups_per_token: give 2
    experts, fewer than model.moe.per_token=3
model.first_dense_layers=8 model.moe.experts=2 -> model.first_dense_layers: be less than
mesh.ici.context=2 mesh.dcn.context=3 data.sequence_length=100 -> data.sequence_length: 2 x
    mesh.*.context = 12; nearest legal: 96 or 108
pipeline.schedule=lockstep_1f1b mesh.ici.context=2 sharding.context_strategy=ring
    pipeline.skip_idle=true -> sharding.context_strategy: pipeline.skip_idle=true; use gather
pipeline.schedule=zb_h1 mesh.ici.context=2 sharding.context_strategy=ring model.attention_window=3
    model.layer_pattern=[local] -> sharding.context_strategy: attention_window; use gather
mesh.ici.context=2 sharding.logical_axis_rules=[[activation_length,[context,tensor]]] ->
    sharding.logical_axis_rules: use [activation_length, [context]]
model.rope_scaling.factor=8 model.rope_scaling.low_freq_factor=4 ->
    model.rope_scaling.low_freq_factor: less than model.rope_scaling.high_freq_factor=4.0
model.rope_scaling.type=longrope model.rope_scaling.short_factor=[1,2] ->
    model.rope_scaling.short_factor: a positive number for each of 8 rotated pairs; got 2 numbers
model.layer_pattern=[local,globl] model.attention_window=4 -> model.layer_pattern: 'globl' is not
    one of global, local, global_nope, local_nope; did you mean global?
model.layer_pattern=[local,global] -> model.layer_pattern: need model.attention_window
model.layer_pattern=[global,global_nope] model.attention_window=4 -> model.attention_window:
    model.layer_pattern has no local layer
sharding.logical_axis_rules=[[embed,[fsdp,fsdp]]] -> sharding.logical_axis_rules: uses a mesh axis
    twice
sharding.logical_axis_rules=[[embed,[fsdp]],[embed,[]]] -> sharding.logical_axis_rules: 'embed' has
    more than one rule
sharding.logical_axis_rules=[[embed,[fdsp]]] -> sharding.logical_axis_rules: no mesh axis 'fdsp';
    did you mean fsdp?
sharding.logical_axis_rules=[[embed,fsdp]] -> sharding.logical_axis_rules: is not of the form
"""


def test_rules_of_the_model_refuse_with_key_and_remedy(unlike):
    assert unlike(REFUSED) == {}


def test_quantisation_of_a_block_that_does_not_quantise_is_refused(problems, monkeypatch):
    monkeypatch.setitem(catalog.BLOCKS, "plain", catalog.Block("a.module:Plain"))
    words = ("model.quantisation=int8", "model.block=plain")
    assert "with model.block=plain, only with llama" in problems(*words)["model.quantisation"]
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
