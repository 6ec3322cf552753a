"""`base_model`: shape, weights, tokenizer and chat template of one model together."""

import json

import pytest
from helpers.hf_folder import write_tokenizer
from helpers.hf_models import recorded

from maxpipe.config import ConfigError, load, replace, to_yaml
from maxpipe.config.load import derive_known
from maxpipe.data.loader import check_base_tokenizer

pytestmark = pytest.mark.usefixtures("own_folder")
ONE_STAGE = ("mesh.ici.stage=1", "mesh.ici.fsdp=4", "pipeline.num_repeats=1")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(recorded("gemma3")["config"]))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@pytest.fixture
def run(tmp_path, folder):
    """The directory of a run that was trained from that folder, with a copy of its tokenizer."""
    config = load("base", [*ONE_STAGE, f"base_model=hf:{folder}"]).config
    path = tmp_path / "runs" / "first"
    write_tokenizer(tmp_path / "runs")
    (tmp_path / "runs").rename(tmp_path / "tokenizer")
    path.mkdir(parents=True)
    (tmp_path / "tokenizer").rename(path / "tokenizer")
    (path / "config.yml").write_text(to_yaml(derive_known(config)))
    return path


def values(*words, file="base"):
    config = load(file, [*ONE_STAGE, *words]).config
    return config.init_from, config.model.from_hf, config.data.tokenizer, config.data.chat_template


def problem(*words, file="base"):
    with pytest.raises(ConfigError) as caught:
        load(file, [*ONE_STAGE, *words])
    return {problem.key: problem.message for problem in caught.value.problems}


def test_folder_gives_shape_weights_tokenizer_and_template(folder):
    base = f"hf:{folder}"
    assert values(f"base_model={base}") == (base, base, base, "")
    assert values(f"base_model={base}", file="finetune") == (base, base, base, "")
    assert load("base", [*ONE_STAGE, f"base_model={base}"]).config.model.embed_dim == 32
    own = values(f"base_model={base}", "data.chat_template=chatml", file="finetune")
    assert own == (base, base, base, "chatml")


def test_run_gives_shape_weights_and_its_copy_of_the_tokenizer(run):
    loaded = load("base", [*ONE_STAGE, f"base_model=run:{run}", "model.dtype=bfloat16"])
    config, tokenizer = loaded.config, str(run / "tokenizer" / "tokenizer.json")
    assert (config.init_from, config.model.from_hf) == (f"run:{run}", "")
    assert (config.model.embed_dim, config.model.rope_scaling.type) == (32, "linear")
    assert (config.model.dtype, config.data.tokenizer) == ("bfloat16", tokenizer)
    assert load("base", [*ONE_STAGE, f"init_from=run:{run}"]).config.data.tokenizer == tokenizer


def test_three_keys_apart_take_the_tokenizer_of_weights_or_shape(folder):
    assert values(f"model.from_hf={folder}")[2] == f"hf:{folder}"
    assert values(f"init_from=hf:{folder}")[2] == f"hf:{folder}"
    assert values(f"init_from=hf:{folder}", "data.tokenizer=byte")[2] == "byte"
    assert values("init_from=hf:org/name")[2] == "hf:org/name"
    assert values(f"model.from_hf={folder}", "data.source=synthetic")[2] == "byte"


def test_base_without_a_tokenizer_and_with_two_rotations_is_said(folder):
    for file in folder.glob("*token*"):
        file.unlink()
    content = recorded("llama")["config"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(content))
    base = f"hf:{folder}"
    lines = load("base", [*ONE_STAGE, f"model.from_hf={base}"]).remarks
    assert [line.partition("=")[0].partition(": ")[0] for line in lines] == [
        "model.from_hf",
        "data.tokenizer",
    ]
    (folder / "vocab.json").write_text("{}")
    assert "SentencePiece .model" in problem(f"base_model={base}")["data.tokenizer"]


def test_rows_longer_than_those_of_the_base_are_said(run, folder):
    most = recorded("gemma3")["config"]["max_position_embeddings"]
    for base, learned in ((f"run:{run}", 128), (f"hf:{folder}", most)):
        for length in (learned, learned + 1):
            words = (f"base_model={base}", f"data.sequence_length={length}")
            said = "".join(load("base", [*ONE_STAGE, *words]).remarks)
            assert (f"={length} is longer than the base's {learned}:" in said) == (length > learned)


def test_keys_that_contradict_the_base_are_refused_and_written_ones_agree(folder, tmp_path):
    base = f"base_model=hf:{folder}"
    assert "base_model=hf:" in problem(base, "init_from=run:other")["init_from"]
    assert "hf:DIR" in problem(f"base_model={folder}")["base_model"]
    assert "config.json" in problem(f"base_model=hf:{tmp_path / 'none'}")["base_model"]
    assert "config.yml" in problem(f"base_model=run:{tmp_path / 'none'}")["base_model"]
    config = load("base", [*ONE_STAGE, base]).config
    (tmp_path / "written.yml").write_text(to_yaml(config))
    assert load(str(tmp_path / "written.yml")).config == config


def test_continued_run_has_its_own_tokenizer_when_the_base_is_gone(run, tmp_path):
    (run / "checkpoints" / "5").mkdir(parents=True)
    words = ["init_from=hf:/none/at/all", "run_name=first", f"output_dir={tmp_path / 'runs'}"]
    assert values(*words)[2] == f"hf:{tmp_path / 'model'}"


def test_other_tokenizer_is_refused_unless_it_is_accepted_or_has_the_same_ids(folder, tmp_path):
    config = load("base", [*ONE_STAGE, f"base_model=hf:{folder}"]).config
    check_base_tokenizer(config)
    more = write_tokenizer(tmp_path / "more", "abcd")
    check_base_tokenizer(replace(config, **{"data.tokenizer": str(more)}))
    for other in ("byte", str(write_tokenizer(tmp_path / "other", "bac"))):
        changed = replace(config, **{"data.tokenizer": other})
        with pytest.raises(ConfigError, match=r"accept_changes=\[tokenizer\]"):
            check_base_tokenizer(changed)
        check_base_tokenizer(replace(changed, **{"checkpoint.accept_changes": ["tokenizer"]}))
