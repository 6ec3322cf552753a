"""Unknown keys: the error names the nearest key at any level, or what MaxText's key is called."""

import re

import pytest

from maxpipe.config import ConfigError, load
from maxpipe.config.maxtext import KEYS
from maxpipe.config.options import OPTIONS, SYNONYMS, unknown_key


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("stepz", "steps"),
        ("num_layers", "model.num_layers"),
        ("pipeline.num_microbatch", "pipeline.num_microbatches"),
        ("pipeline.num_layers", "model.num_layers"),
        ("train.steps", "steps"),
        ("model.learning_rate", "optimizer.learning_rate"),
        ("mesh.stage", "mesh.ici.stage or mesh.dcn.stage"),
        ("mesh.icy.stage", "mesh.ici.stage or mesh.dcn.stage"),
        ("checkpoint.evry", "checkpoint.every"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("rope_scaling.factor", "model.rope_scaling.factor"),
        ("model.rope.factor", "model.rope_scaling.factor"),
        ("learning_rat", "optimizer.learning_rate"),
        ("batch_size", "data.global_batch_size or eval.global_batch_size"),
    ],
)
def test_unknown_key_names_the_nearest_at_any_level(key, meant):
    assert unknown_key(key) == f"unknown key; did you mean {meant}?"


def test_unknown_section_is_one_problem(write):
    path = write("run.yml", "optimzer:\n  name: adamw\n  learning_rate: 1e-3\n")
    with pytest.raises(ConfigError, match=r"optimzer .*did you mean optimizer\?") as caught:
        load(path)
    assert len(caught.value.problems) == 1


def test_unknown_key_like_none_proposes_nothing():
    assert "did you mean" not in unknown_key("zzzzqqqq")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("model.hidden_size", "model.embed_dim"),
        ("num_stages", "mesh.ici.stage"),
        ("seq_len", "data.sequence_length"),
        ("optimizer.weightdecay", "optimizer.weight_decay"),
        ("checkpoint.keep_evry", "checkpoint.keep_every"),
    ],
)
def test_unknown_key_of_the_same_meaning_is_found(key, meant):
    assert unknown_key(key) == f"unknown key; did you mean {meant}?"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.window", "model.attention_window"),
        ("data.batch_size", "data.global_batch_size"),
        ("model.moe.num_expert", "model.moe.experts"),
        ("model.moe.num_experts", "model.moe.experts"),
        ("model.layers", "model.num_layers"),
        ("model.layer", "model.num_layers"),
        ("pipeline.microbatch", "pipeline.num_microbatches"),
        ("pipeline.num_repeat", "pipeline.num_repeats"),
        ("pipeline.schedlue", "pipeline.schedule"),
        ("data.foo.tokenizr", "data.tokenizer"),
        ("optimizer.foo.lr", "optimizer.learning_rate"),
    ],
)
def test_unknown_key_of_a_section_names_what_is_near_in_it(key, meant):
    assert unknown_key(key) == f"unknown key; did you mean {meant}?"


def test_unknown_key_that_differs_in_a_letter_from_one_of_another_section_names_that():
    assert unknown_key("pipeline.num_layer") == "unknown key; did you mean model.num_layers?"
    assert unknown_key("data.learning_rat") == "unknown key; did you mean optimizer.learning_rate?"


def test_synonyms_name_our_keys_and_shadow_none():
    names = {key.rpartition(".")[2] for key in OPTIONS}
    for theirs, ours in SYNONYMS.items():
        assert set(ours) <= OPTIONS.keys(), theirs
        assert theirs not in names


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.foo",
        "optimizer.momentum_warm",
        "model.num_towers",
        "model.size",
        "pipeline.num_rabbits",
        "data.shards",
        "model.dim",
        "model.heads",
        "data.foo.bar",
        "data.window",
        "eval.num_expert_groups",
        "checkpoint.foo.bar.baz",
    ],
)
def test_unknown_key_that_is_like_none_names_the_keys_of_its_section(key):
    section = key.partition(".")[0]
    message = unknown_key(key)
    assert message.startswith(f"unknown key; the keys of {section} are ")
    inside = {name.split(".")[1] for name in OPTIONS if name.startswith(f"{section}.")}
    assert set(message.partition(" are ")[2].split(", ")) == inside


@pytest.mark.parametrize(
    ("key", "parent", "kind"),
    [
        ("sharding.logical_axis_rules.embed", "sharding.logical_axis_rules", "list"),
        ("sharding.logical_axis_rules.foo", "sharding.logical_axis_rules", "list"),
        ("data.mixture.0.path", "data.mixture", "list"),
        ("steps.remat_policy", "steps", "value"),
        ("mesh.ici.stage.num_layers", "mesh.ici.stage", "value"),
    ],
)
def test_unknown_key_below_a_list_or_a_value_says_that_it_is_no_section(key, parent, kind):
    message = f"unknown key; {parent} takes a {kind} and is no section, see --help {parent}"
    assert unknown_key(key) == message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.rope", "model.rope_scaling"),
        ("model.mao", "the keys of model"),
        ("model.rope_scalng", "model.rope_scaling"),
        ("chekpoint", "checkpoint"),
        ("data.foo", "the keys of data"),
    ],
)
def test_unknown_section_names_the_nearest_or_the_keys_around_it(key, meant):
    message = unknown_key(key, is_section=True)
    hint = meant if " " in meant else f"did you mean {meant}?"
    assert message.startswith(f"unknown key; {hint}")


def test_unknown_key_without_a_section_names_the_sections():
    message = unknown_key("zzzzqqqq")
    assert "the sections are model, data, eval, mesh," in message
    assert "--help SECTION" in message


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("num_experts", "is called model.moe.experts here"),
        ("model.num_experts", "is called model.moe.experts here"),
        ("shared_experts", "has no counterpart: experts that every token uses"),
        ("num_experts_per_tok", "is called model.moe.per_token here"),
        ("mlp_activations", "is called model.mlp_activation here (silu for [silu, linear]"),
        ("grad_dtype", "has no counterpart: sums of squares"),
        ("mu_dtype", "has no counterpart: sums of squares"),
        ("shard_optimizer_over_data", "has no counterpart: the state stays on the devices"),
        ("attention_type", "is called model.attention_kind here (gqa for global, mla for mla"),
        ("moba_chunk_size", "plays no part here: for attention that no block has"),
        ("quantization", "has no counterpart: model.quantisation computes scales in another way"),
        ("use_iota_embed", "plays no part here: a matter of how the same products"),
        ("enable_goodput_recording", "plays no part here: every run writes metrics.jsonl"),
        ("remat_policy", "is called pipeline.remat_policy here (minimal also keeps context"),
    ],
)
def test_unknown_key_of_maxtext_says_what_to_use(key, message):
    assert f"MaxText's {key.rpartition('.')[2]} {message}" in unknown_key(key)


@pytest.mark.parametrize("key", ["vocab_size", "learning_rate", "packing"])
def test_unknown_key_that_both_have_is_ours(key):
    assert unknown_key(key).startswith("unknown key; did you mean ")


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("ici_pipeline_parallelism", "mesh.ici.stage"),
        ("dcn_data_parallelism", "mesh.dcn.data"),
        ("num_pipeline_repeats", "pipeline.num_repeats"),
        ("base_emb_dim", "model.embed_dim"),
        ("checkpoint_period", "checkpoint.every"),
        ("max_target_length", "data.sequence_length"),
    ],
)
def test_unknown_key_of_maxtext_is_translated(base, key, ours):
    with pytest.raises(ConfigError, match=f"MaxText's {key} is called {ours} here"):
        load(base, [f"{key}=2"])


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [
        ("ici_fsdp_paralelism", "ici_fsdp_parallelism", "mesh.ici.fsdp"),
        ("ici_pipeline_paralelism", "ici_pipeline_parallelism", "mesh.ici.stage"),
    ],
)
def test_unknown_key_misspelt_maxtext_is_translated(key, theirs, ours):
    assert unknown_key(key).startswith(f"unknown key; MaxText's {theirs} is called {ours} here")


def test_unknown_key_of_maxtext_without_counterpart_gives_the_reason():
    assert unknown_key("param_scan_axis").startswith(
        "MaxText's param_scan_axis has no counterpart: checkpoints"
    )


def test_maxtext_keys_name_ours_and_shadow_none():
    for theirs, (ours, differs) in KEYS.items():
        assert theirs not in OPTIONS
        assert ours in OPTIONS or (not ours and differs), theirs


def test_unknown_key_that_one_may_look_for_says_how_to_do_without_it():
    message = unknown_key("pipeline.devices_per_stage")
    assert "equally many devices" in message
    assert "maxpipe.pipeline.mpmd" in message
    named = set(re.findall(r"\bpipeline\.\w+(?==)", message))
    assert named
    assert named <= {*OPTIONS}
