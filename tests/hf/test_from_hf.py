"""`model.from_hf`: the shape of a folder's config.json over that of YAML files."""

import json

import pytest
from helpers.hf_models import recorded

from maxpipe.config import ConfigError, load, resolve
from maxpipe.config.from_hf import read_shape
from maxpipe.config.options import update
from maxpipe.config.printing import print_config
from maxpipe.hf.matching import shape_problems

ONE_STAGE = ("mesh.ici.stage=1", "mesh.ici.fsdp=4", "pipeline.num_repeats=1")


@pytest.fixture
def folder(tmp_path):

    def _folder(**changes):
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(recorded("gemma3")["config"] | changes))
        return str(path)

    return _folder


def problems(*words):
    with pytest.raises(ConfigError) as caught:
        load("base", [*ONE_STAGE, *words])
    return {problem.key: problem.message for problem in caught.value.problems}


def test_shape_of_the_folder_overrides_that_of_the_files(folder):
    loaded = load("base", [*ONE_STAGE, f"model.from_hf={folder()}", "model.dtype=bfloat16"])
    model = loaded.config.model
    assert (model.num_layers, model.embed_dim, model.vocab_size) == (7, 32, 64)
    assert model.layer_pattern == ["local"] * 5 + ["global"]
    assert (model.norm_placement, model.rope_scaling.type) == ("sandwich", "linear")
    assert model.dtype == "bfloat16"
    assert loaded.sources["model.dtype"] == "command line"
    line = next(line for line in print_config(loaded).splitlines() if "embed_dim:" in line)
    assert line.endswith(f"# {folder()}/config.json")


def test_key_of_the_command_line_may_only_say_the_same(folder):
    words = [f"model.from_hf={folder()}", "model.num_layers=7"]
    assert load("base", [*ONE_STAGE, *words]).config.model.num_layers == 7
    found = problems(*words, "model.embed_dim=64", "model.norm_offset=false", "model.head_dim=-1")
    assert found == {
        "model.embed_dim": f"is 64, but {folder()}/config.json says 32; leave the key out",
        "model.norm_offset": f"is False, but {folder()}/config.json says True; leave the key out",
    }


def test_how_experts_are_balanced_and_reached_stays_the_users(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(recorded("deepseek_v3")["config"]))
    words = [f"model.from_hf={tmp_path}", "model.moe.dispatch=all_to_all"]
    words += ["model.moe.bias_rate=1e-3", "model.moe.capacity_factor=1.25"]
    config = load("base", [*ONE_STAGE, *words]).config
    moe = config.model.moe
    assert (moe.dispatch, moe.bias_rate, moe.capacity_factor) == ("all_to_all", 1e-3, 1.25)
    # A rate implies the bias of the file; without either, the file's bias has no place.
    shape = read_shape(str(tmp_path), "init_from")
    by_rate = update(config, {"model.moe.selection_bias": False})
    assert shape_problems(by_rate, shape, str(tmp_path)) == []
    (problem,) = shape_problems(update(by_rate, {"model.moe.bias_rate": 0.0}), shape, str(tmp_path))
    assert problem.key == "model.moe.selection_bias"


def test_vocabulary_may_have_more_rows_than_the_file_and_not_fewer(folder):
    name = f"model.from_hf={folder()}"
    loaded = load("base", [*ONE_STAGE, name, "model.vocab_size=80"])
    model = resolve(loaded, 4).model
    assert (model.vocab_size, model.unpadded_vocab_size, model.num_token_ids) == (80, 64, 64)
    assert loaded.sources["model.vocab_size"] == "command line"
    unpadded = resolve(load("base", [*ONE_STAGE, name]), 4).model
    assert (unpadded.vocab_size, unpadded.unpadded_vocab_size) == (64, 64)
    message = problems(name, "model.vocab_size=60")["model.vocab_size"]
    assert message == f"is 60, but {folder()}/config.json says 64; leave the key out"
    found = problems(name, "model.vocab_size=80", "model.unpadded_vocab_size=70")
    assert "is 70, but" in found["model.unpadded_vocab_size"]
    message = problems("model.vocab_size=60", "model.unpadded_vocab_size=64")["model.vocab_size"]
    assert message == "60 is less than model.unpadded_vocab_size=64"


def test_model_that_cannot_be_expressed_is_refused_with_the_reason(folder):
    short_yarn = {"rope_type": "yarn", "factor": 0.5}
    no_length = {"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": None}
    for changes, message in (
        ({"model_type": "gemma4"}, "has model_type 'gemma4', which is not one of deepseek_v3"),
        ({"hidden_activation": "relu"}, "of a gemma3_text: hidden_activation 'relu' is no option"),
        ({"layer_types": ["linear_attention"] * 7}, "layer_types has linear_attention"),
        ({"layer_types": ["full_attention"]}, "lists 1 layers, but num_hidden_layers is 7"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention makes it an encoder"),
        ({"num_hidden_layers": 10**9}, "is 1000000000, not a whole number above 0 and at most"),
        ({"rms_norm_eps": -1.0}, "model.norm_eps must be greater than 0; got -1.0"),
        ({"head_dim": 10**400}, "head_dim must be finite"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is [1], not an object"),
        ({"rope_parameters": short_yarn}, "model.rope_scaling.factor must be at least 1; got 0.5"),
        (no_length, "yarn needs original_max_position_embeddings or max_position_embeddings"),
    ):
        assert message in problems(f"model.from_hf={folder(**changes)}")["model.from_hf"]


def test_folder_without_a_readable_file_is_refused(tmp_path):
    words = f"model.from_hf={tmp_path}"
    assert "there is no " in problems(words)["model.from_hf"]
    for content, message in {"{": "cannot read ", "[]": "is not a JSON object"}.items():
        (tmp_path / "config.json").write_text(content)
        assert message in problems(words)["model.from_hf"]


def test_init_from_has_the_form_of_a_local_folder():
    for word in ("init_from=/models/x", "init_from=hf:"):
        assert "none of the forms run:DIR, hf:DIR" in problems(word)["init_from"]
