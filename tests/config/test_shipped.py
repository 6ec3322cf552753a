"""Configurations that ship with maxpipe: by name, as configs/..., and as `base:`."""

import pytest

from maxpipe.config import ConfigError, load
from maxpipe.config.cli import parse_args
from maxpipe.config.imports import install_command
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


def test_a_file_that_exists_comes_before_a_preset(elsewhere):
    (elsewhere / "configs").mkdir()
    for name in ("base", "configs/base.yml"):
        (elsewhere / name).write_text("run_name: mine\n")
        assert load(name).config.run_name == "mine"


def test_a_file_inherits_from_a_preset_by_name(elsewhere):
    (elsewhere / "mine.yml").write_text("base: qwen3-8b\nsteps: 5\n")
    loaded = load("mine.yml")
    assert (loaded.config.run_name, loaded.config.steps) == ("qwen3-8b", 5)


def test_a_file_inherits_from_one_below_the_home_directory(elsewhere, monkeypatch):
    monkeypatch.setenv("HOME", str(elsewhere / "home"))
    (elsewhere / "home").mkdir()
    (elsewhere / "home" / "x.yml").write_text("steps: 7\n")
    (elsewhere / "mine.yml").write_text("base: ~/x.yml\n")
    assert load("mine.yml").config.steps == 7


def test_a_misspelt_preset_is_answered_with_the_nearest(elsewhere):
    with pytest.raises(ConfigError, match=r"'lama3-8b' is neither .*did you mean llama3-8b\?"):
        load("lama3-8b")
    with pytest.raises(ConfigError, match="the presets are base, finetune, mixture, muon, "):
        load("zzz")


def test_a_file_without_its_ending_is_answered_with_the_file(elsewhere):
    (elsewhere / "tiny.yml").write_text("steps: 3\n")
    with pytest.raises(ConfigError, match=r"did you mean tiny\.yml\?"):
        load("tiny")


def test_a_directory_hides_no_preset(elsewhere):
    (elsewhere / "base").mkdir()
    (elsewhere / "mine.yml").write_text("base: base\n")
    assert load("base").config.run_name == load("mine.yml").config.run_name == "base"


def test_a_run_in_place_of_a_file_is_answered_with_its_configuration(elsewhere):
    run = elsewhere / "runs" / "tiny"
    run.mkdir(parents=True)
    with pytest.raises(ConfigError, match="runs/tiny is a directory; name a YAML file"):
        load("runs/tiny")
    (run / "config.yml").touch()
    with pytest.raises(ConfigError, match=r"did you mean runs/tiny/config\.yml\?"):
        load("runs/tiny")


def test_help_and_a_command_without_a_config_list_the_presets(elsewhere, capsys):
    with pytest.raises(ConfigError) as error:
        parse_args(["steps=3"], prog="prog", description="Does it.")
    with pytest.raises(SystemExit):
        parse_args(["--help"], prog="prog", description="Does it.")
    for shown in (str(error.value), " ".join(capsys.readouterr().out.split())):
        assert ", ".join(shipped_configs()) in shown


def test_install_command_fits_a_checkout():
    assert install_command("data") == "pip install -e '.[data]'"
