"""Unknown keys: the error names the nearest key at any level, or what MaxText's key is called."""

import pytest

from maxpipe.config import ConfigError, load
from maxpipe.config.maxtext import KEYS
from maxpipe.config.options import OPTIONS, unknown_key


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
