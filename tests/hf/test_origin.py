"""What a run keeps of its folder decides where texts end, as long as the tokenizer is the same."""

import json

import pytest
from helpers.hf_folder import write_tokenizer

from maxpipe.config import Config, ConfigError, replace
from maxpipe.hf.origin import end_ids, origin_of, read_origin
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
    (origin / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        end_ids(origin, [copy])
    other = write_tokenizer(tmp_path / "other", "abcd")
    assert end_ids(origin, [other]) == end_ids(origin, []) == end_ids(None, [other]) == set()


def test_run_keeps_small_files_of_its_folder_and_replaces_those_of_an_earlier_one(origin, tmp_path):
    run = tmp_path / "base"
    (run / "checkpoints").mkdir(parents=True)
    (run / "origin").symlink_to(origin)
    names = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    for place in (f"run:{run}", f"run:{run}/checkpoints", f"hf:{origin}"):
        config = replace(Config(), output_dir=str(tmp_path / "runs"), init_from=place)
        assert read_origin(config).keys() == names
    (origin / "model.safetensors").write_bytes(b"x")
    directory = RunDirectory(config)
    directory.origin.mkdir(parents=True)
    (directory.origin / "vocab.json").touch()
    directory.claim()
    kept = sorted(directory.origin.iterdir())
    assert {file.name for file in kept} == names
    assert origin_of(config, kept) == directory.origin
    assert origin_of(config, []) == origin  # a run of an earlier version
    RunDirectory(replace(config, init_from="")).claim()
    assert not any(directory.origin.iterdir())
    assert origin_of(replace(config, init_from=""), []) is None
