"""What a run keeps of its folder decides where texts end, as long as the tokenizer is the same."""

import json
import os

import pytest
from helpers.hf_folder import write_tokenizer

from maxpipe.config import Config, ConfigError, replace
from maxpipe.config.from_hf import read_config_json
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.hf.origin import end_ids, origin_of, read_origin, special_ids
from maxpipe.storage.object_store import Deadline
from maxpipe.training.run_directory import RunDirectory


@pytest.fixture
def origin(tmp_path):
    write_tokenizer(tmp_path / "origin")
    (tmp_path / "origin" / "config.json").write_text('{"eos_token_id": 3}')
    return tmp_path / "origin"


def test_texts_end_at_ids_of_generation_config_or_of_config(origin, tmp_path):
    copy = write_tokenizer(tmp_path / "run")
    assert end_ids(origin, [copy]) == {3}
    for ids, expected in (([1, 4], {1, 4}), (4, {4}), (None, {3})):
        (origin / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert end_ids(origin, [copy]) == expected
    (origin / "generation_config.json").write_text("{}")
    assert end_ids(origin, [copy]) == {3}


def test_ids_of_another_tokenizer_end_nothing(origin, tmp_path):
    other = write_tokenizer(tmp_path / "run", "abcd")
    assert end_ids(origin, [other]) == end_ids(origin, []) == end_ids(None, [other]) == set()


def test_damaged_file_is_named(origin, tmp_path):
    (origin / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        end_ids(origin, [write_tokenizer(tmp_path / "run")])


def test_pipe_in_a_folder_is_no_file(origin, tmp_path):
    (origin / "config.json").unlink()
    os.mkfifo(origin / "config.json")
    config = replace(Config(), output_dir=str(tmp_path), init_from=f"hf:{origin}")
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert Deadline(20).wait(lambda: read_origin(config)).keys() == names
    with pytest.raises(ConfigError, match=r"there is no .*config\.json"):
        Deadline(20).wait(lambda: read_config_json(str(origin)))


@pytest.mark.parametrize("place", ["base", "base/checkpoints"])
def test_run_that_starts_from_another_keeps_its_files_but_no_pipe(place, origin, tmp_path):
    run = tmp_path / "base"
    (run / "checkpoints").mkdir(parents=True)
    origin.rename(run / "origin")
    os.mkfifo(run / "origin" / "vocab.json")
    config = replace(Config(), init_from=f"run:{tmp_path / place}")
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert Deadline(20).wait(lambda: read_origin(config)).keys() == names


def test_special_ids_are_those_of_the_tokenizer(origin):
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    assert special_ids(load_tokenizer("byte")) == ids
    own = load_tokenizer(str(origin / "tokenizer.json"))
    assert special_ids(own) == {"eos_token_id": 1, "pad_token_id": 1}  # it names no other token


def test_run_keeps_small_files_of_its_folder_and_replaces_those_of_an_earlier_one(origin, tmp_path):
    (origin / "model.safetensors").write_bytes(b"x")
    config = replace(Config(), output_dir=str(tmp_path / "runs"), init_from=f"hf:{origin}")
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert read_origin(config).keys() == names
    directory = RunDirectory(config)
    directory.origin.mkdir(parents=True)
    (directory.origin / "vocab.json").touch()
    directory.keep_origin(config)
    kept = sorted(directory.origin.iterdir())
    assert {file.name for file in kept} == names
    assert origin_of(config, kept) == directory.origin
    assert origin_of(config, []) == origin  # a run of an earlier version
    directory.keep_origin(replace(config, init_from=""))
    assert not any(directory.origin.iterdir())
    assert origin_of(replace(config, init_from=""), []) is None
