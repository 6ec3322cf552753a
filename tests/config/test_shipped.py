"""Configurations that ship with maxpipe: by name, as configs/..., and as `base:`."""

import pytest

from maxpipe.config import ConfigError, load
from maxpipe.config.shipped import shipped_configs


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_config_is_a_preset_by_its_name(elsewhere):
    names = list(shipped_configs())
    assert names[:4] == ["base", "finetune", "mixture", "muon"]
    assert {"llama3-8b", "v5p-512"} <= set(names)
    for name in names:
        load(name)


def test_load_of_a_preset_works_in_every_directory(elsewhere):
    for word in ("llama3-8b", "configs/models/llama3-8b.yml"):
        loaded = load(word, ["steps=9"])
        assert (loaded.config.run_name, loaded.config.steps) == ("llama3-8b", 9)
        assert "configs/models/llama3-8b.yml:" in loaded.sources["model.num_layers"]
        (elsewhere / "mine.yml").write_text(f"base: {word}")
        assert load("mine.yml").config.run_name == "llama3-8b"


def test_a_file_that_exists_comes_before_a_preset(elsewhere):
    (elsewhere / "configs").mkdir()
    for name in ("base", "configs/base.yml"):
        (elsewhere / name).write_text("run_name: mine\n")
        assert load(name).config.run_name == "mine"


def test_what_is_no_configuration_is_answered_with_the_nearest(elsewhere):
    (elsewhere / "empty").mkdir()
    for word, message in {
        "lama3-8b": r"'lama3-8b' is neither .*did you mean llama3-8b\?",
        "zzz": "the presets are base, finetune, mixture, muon, ",
        "empty": "empty is a directory; name a YAML file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load(word)
