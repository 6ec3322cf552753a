"""Paths in a file are relative to it, unless only the working directory has what they name."""

import pytest

from maxpipe.config import load
from maxpipe.config.options import get
from maxpipe.config.printing import to_yaml
from maxpipe.data.files import find_files


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; conf/ and e[1]/ in it have files, and some lie next to these."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("a.txt", "both.txt", "conf/b.txt", "conf/both.txt", "conf/byte", "e[1]/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("model/tokenizer.json", "set/x", "own.csv", "tok.json", "web.bin"):
        (tmp_path / "conf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "conf" / name).touch()
    return tmp_path


def value_of(file, key, text, *words):
    with open(file, "w") as opened:
        opened.write(f"{key}: {text!r}\n" if isinstance(text, str) else f"{key}: {text}\n")
    source = ["data.source=text"] if key == "data.path" else []
    return get(load(file, [*source, *words]).config, key)


def test_paths_in_files(here):
    table = {  # key and its text in conf/run.yml: the value
        ("data.path", "b.txt"): "conf/b.txt",
        ("data.path", "*.txt, ../conf/b.txt"): "conf/*.txt,conf/b.txt",
        ("data.path", "both.txt"): "conf/both.txt",
        ("data.path", "web"): "conf/web",  # of Megatron-LM's web.bin and web.idx
        ("data.path", "a.txt"): "a.txt",  # only in the working directory, as in earlier versions
        ("data.tokenizer", "tok.json"): "conf/tok.json",
        ("data.tokenizer", "byte"): "byte",  # a name of the catalogue
        ("data.tokenizer", "hf:model"): "hf:conf/model",
        ("data.tokenizer", "~/t.json"): f"{here}/home/t.json",
        ("init_from", "hf:model"): "hf:conf/model",
        ("pipeline.schedule", "own.csv"): "conf/own.csv",
        ("output_dir", "runs"): "runs",
        ("output_dir", "~/runs"): f"{here}/home/runs",
    }
    stay = ("/abs/a.txt", "~/a.txt", "s3://b/a.txt", "missing.txt", "hf:org/name:en", "hf::train")
    table |= {("data.path", path): path for path in stay}
    for selection in ("", ":en", "::train", ":en:train[:5%]"):
        table["data.path", f"hf:set{selection}"] = f"hf:conf/set{selection}"
    assert {case: value_of("conf/run.yml", *case) for case in table} == table
    mixture = [{"source": "text", "path": "b.txt", "weight": 1}]
    assert value_of("conf/run.yml", "data.mixture", mixture)[0]["path"] == "conf/b.txt"


def test_paths_of_other_places(here):
    words = ("data.path=b.txt", "compile.save=~/step")
    assert value_of("conf/run.yml", "data.path", "a.txt", *words) == "b.txt"
    assert load("conf/run.yml", [*words, "data.source=text"]).config.compile.save == (
        f"{here}/home/step"
    )
    value_of("conf/base.yml", "data.tokenizer", "tok.json")
    (here / "run.yml").write_text("base: conf/base.yml\n")
    assert load("run.yml").config.data.tokenizer == "conf/tok.json"
    pattern = value_of("e[1]/run.yml", "data.path", "*.txt, a.txt")
    assert pattern == "e[[]1]/*.txt,e[1]/a.txt"
    assert find_files(pattern) == ["e[1]/a.txt"]


def test_written_config_read_from_its_own_place_means_the_same(here):
    value_of("conf/run.yml", "data.tokenizer", "tok.json")
    config = load("conf/run.yml").config
    (here / "runs").mkdir()
    (here / "runs" / "config.yml").write_text(to_yaml(config))
    assert load("runs/config.yml").config == config
