"""Paths in a file are relative to it, unless only the working directory has what they name."""

import pytest

from maxpipe.config import load
from maxpipe.config.errors import ConfigError
from maxpipe.config.load import resolve
from maxpipe.config.printing import notes, to_yaml
from maxpipe.data.files import find_files


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return a working directory and, below it, the directory of a file."""
    here = tmp_path / "work"
    beside = here / "conf"
    beside.mkdir(parents=True)
    monkeypatch.chdir(here)
    return here, beside


def path_of(beside, path, *words):
    (beside / "run.yml").write_text(f"data: {{source: text, path: '{path}'}}\n")
    return load("conf/run.yml", words).config.data.path


def test_path_in_a_file_is_relative_to_the_file(places):
    _, beside = places
    (beside / "a.txt").touch()
    assert path_of(beside, "a.txt") == "conf/a.txt"
    assert path_of(beside, "*.txt, ../conf/a.txt") == "conf/*.txt,conf/a.txt"


def test_path_only_in_the_working_directory_keeps_its_meaning(places):
    here, beside = places
    (here / "a.txt").touch()
    assert path_of(beside, "a.txt") == "a.txt"


def test_path_in_both_places_is_that_next_to_the_file_and_said(places):
    here, beside = places
    (here / "a.txt").touch()
    (beside / "a.txt").touch()
    assert path_of(beside, "a.txt") == "conf/a.txt"
    loaded = load("conf/run.yml")
    (line,) = (line for line in notes(resolve(loaded, 1), loaded) if line.startswith("data.path"))
    assert line == (
        "data.path=conf/a.txt: paths in a file are relative to it; "
        "a.txt in the working directory is not read"
    )


def test_path_that_is_not_relative_or_names_nothing_stays(places):
    for path in ("/abs/a.txt", "~/a.txt", "s3://b/a.txt", "missing.txt"):
        assert path_of(places[1], path) == path


def test_path_on_the_command_line_is_relative_to_the_working_directory(places):
    _, beside = places
    (beside / "a.txt").touch()
    assert path_of(beside, "b.txt", "data.path=a.txt") == "a.txt"


def test_path_of_an_inherited_file_is_relative_to_that_file(places):
    here, beside = places
    (beside / "tok.json").touch()
    (beside / "base.yml").write_text("data: {tokenizer: tok.json}\n")
    (here / "run.yml").write_text("base: conf/base.yml\n")
    assert load("run.yml").config.data.tokenizer == "conf/tok.json"


def test_folder_of_a_model_is_relative_to_the_file(places):
    _, beside = places
    (beside / "model").mkdir()
    (beside / "model" / "tokenizer.json").touch()
    (beside / "run.yml").write_text("{init_from: hf:model, data: {tokenizer: hf:model}}\n")
    config = load("conf/run.yml").config
    assert (config.init_from, config.data.tokenizer) == ("hf:conf/model", "hf:conf/model")


def test_pattern_in_a_file_whose_directory_has_brackets_finds_its_files(places):
    here, _ = places
    (here / "e[1]").mkdir()
    (here / "e[1]" / "a.txt").touch()
    (here / "e[1]" / "run.yml").write_text("data: {source: text, path: '*.txt, a.txt'}\n")
    path = load("e[1]/run.yml").config.data.path
    assert path == "e[[]1]/*.txt,e[1]/a.txt"
    assert find_files(path) == ["e[1]/a.txt"]


def test_directory_of_a_data_set_is_relative_to_the_file_whatever_is_selected(places):
    _, beside = places
    (beside / "set").mkdir()
    for selection in ("", ":en", "::train", ":en:train[:5%]"):
        assert path_of(beside, f"hf:set{selection}") == f"hf:conf/set{selection}"
        for elsewhere in (f"hf:org/name{selection}", "hf::train"):
            assert path_of(beside, elsewhere) == elsewhere


def test_names_of_the_catalogue_are_no_paths(places):
    _, beside = places
    (beside / "byte").touch()
    (beside / "run.yml").write_text("data: {tokenizer: byte}\n")
    assert load("conf/run.yml").config.data.tokenizer == "byte"


def test_paths_of_a_mixture_and_of_a_schedule_are_relative_to_the_file(places):
    _, beside = places
    (beside / "a.txt").touch()
    (beside / "own.csv").touch()
    (beside / "run.yml").write_text(
        "data: {mixture: [{source: text, path: a.txt, weight: 1}]}\npipeline: {schedule: own.csv}\n"
    )
    config = load("conf/run.yml").config
    assert config.data.mixture[0]["path"] == "conf/a.txt"
    assert config.pipeline.schedule == "conf/own.csv"


def test_written_config_read_from_its_own_place_means_the_same(places):
    here, beside = places
    (beside / "a.txt").touch()
    path_of(beside, "a.txt")
    config = load("conf/run.yml").config
    (here / "runs").mkdir()
    (here / "runs" / "config.yml").write_text(to_yaml(config))
    assert load("runs/config.yml").config == config


def test_home_of_a_path_that_a_run_writes_or_reads_is_the_users(places, monkeypatch):
    here, beside = places
    monkeypatch.setenv("HOME", str(here / "home"))
    (beside / "run.yml").write_text("output_dir: ~/runs\ndata: {tokenizer: ~/tokenizer.json}\n")
    words = ["compile.cache_dir=~/cache", "compile.save=~/step"]
    config = load("conf/run.yml", words).config
    assert config.output_dir == f"{here}/home/runs"
    assert config.data.tokenizer == f"{here}/home/tokenizer.json"
    assert (config.compile.cache_dir, config.compile.save) == (
        f"{here}/home/cache",
        f"{here}/home/step",
    )


def test_list_or_null_in_place_of_a_path_is_refused(places):
    for value in ("[~/a]", "~"):
        (places[1] / "run.yml").write_text(f"output_dir: {value}\n")
        with pytest.raises(ConfigError, match="output_dir"):
            load("conf/run.yml")
