"""Unknown keys: the error names the nearest key at any level, or what MaxText's key is called."""

from pathlib import Path

import pytest

from maxpipe.config import ConfigError, load
from maxpipe.config.maxtext import KEYS, LIMITS, misspelt
from maxpipe.config.options import OPTIONS, SYNONYMS, unknown_key

MEANT = {  # unknown key: what the message proposes
    # The nearest at any level
    "step": "steps",
    "num_layers": "model.num_layers",
    "pipeline.num_layers": "model.num_layers",
    "mesh.stage": "mesh.ici.stage or mesh.dcn.stage",
    "checkpoint.evry": "checkpoint.every",
    # One of the same meaning
    "optimizer.lr": "optimizer.learning_rate",
    "num_stages": "mesh.ici.stage",
    # What is near in its section
    "model.layers": "model.num_layers",
    "eval.batch_size": "data.global_batch_size or eval.global_batch_size",
}


def test_unknown_key_names_what_was_meant():
    messages = {key: f"unknown key; did you mean {meant}?" for key, meant in MEANT.items()}
    assert {key: unknown_key(key) for key in MEANT} == messages


def test_synonyms_name_our_keys_and_shadow_none():
    names = {key.rpartition(".")[2] for key in OPTIONS}
    for theirs, ours in SYNONYMS.items():
        assert set(ours) <= OPTIONS.keys(), theirs
        assert theirs not in names


def test_unknown_key_that_is_like_none_names_the_keys_of_its_section():
    for key in ("optimizer.momentum_warm", "model.num_towers", "checkpoint.foo.bar.baz"):
        section = key.partition(".")[0]
        beginning, _, listed = unknown_key(key).partition(" are ")
        inside = {name.split(".")[1] for name in OPTIONS if name.startswith(f"{section}.")}
        assert (beginning, {*listed.split(", ")}) == (f"unknown key; the keys of {section}", inside)
    assert "the keys of model" in unknown_key("model.mao", is_section=True)
    assert "did you mean model.rope_scaling?" in unknown_key("model.rope_scalng", is_section=True)
    assert "the sections are model, data, eval, mesh," in unknown_key("zzzzqqqq")


OF_MAXTEXT = {  # key of MaxText: what to use
    "ici_pipeline_parallelism": "is called mesh.ici.stage here",
    "model.num_experts": "is called model.moe.experts here",
    "quantization": "has no counterpart: set model.quantisation instead",
    "remat_policy": "is called pipeline.remat_policy here (minimal also keeps context",
}


def test_unknown_key_of_maxtext_says_what_to_use(base):
    messages = {key: unknown_key(key) for key in OF_MAXTEXT}
    unlike = {
        key: message
        for key, message in messages.items()
        if f"MaxText's {key.rpartition('.')[2]} {OF_MAXTEXT[key]}" not in message
    }
    assert unlike == {}
    for theirs, ours in (("ici_fsdp", "mesh.ici.fsdp"), ("ici_pipeline", "mesh.ici.stage")):
        message = unknown_key(f"{theirs}_paralelism")
        assert f"MaxText's {theirs}_parallelism is called {ours} here" in message
    with pytest.raises(ConfigError, match=r"MaxText's base_emb_dim is called model.embed_dim here"):
        load(base, ["base_emb_dim=2"])


def test_a_configuration_of_maxtext_is_told_who_translates_it(write):
    with pytest.raises(ConfigError, match=r"3 keys are MaxText's; maxpipe from_maxtext /.*/a.yml"):
        load(write("a.yml", "emb_dim: 8\nhead_dim: 4\nici_fsdp_parallelism: 2\n"))


def test_maxtext_keys_name_ours_and_shadow_none():
    for theirs, (ours, differs, _) in KEYS.items():
        assert theirs not in OPTIONS
        assert ours in OPTIONS or (not ours and differs), theirs


NAMES = (Path(__file__).parent / "maxtext_keys.txt").read_text().split()  # of its base.yml
OLDER = {  # names of earlier versions
    "model_fsdp_ag_once",
    "num_decoder_layers",
    "emb_dim",
    "cosine_learning_rate_final_fraction",
}


def test_tables_name_keys_of_maxtext_once():
    limited = [key for limit in LIMITS for key in limit.keys]
    assert len({*limited, *KEYS}) == len(limited) + len(KEYS)
    assert {*limited} - {*NAMES} == {"lora_rank"}  # of another file
    assert {*KEYS} - {*NAMES, *OLDER} == {"base_config"}
    pipeline = [name for name in NAMES if "pipeline" in name and not name.startswith("scan")]
    assert [name for name in pipeline if not KEYS[name].ours] == []


def test_no_key_of_maxtext_counts_as_misspelt():
    named = {*KEYS, *(key for limit in LIMITS for key in limit.keys)}
    assert {n: misspelt(n) for n in NAMES if n not in named and misspelt(n)} == {
        "mtc_data_parallelism": "ici_data_parallelism"
    }
    assert misspelt("eval_intervl") == "eval_interval"
