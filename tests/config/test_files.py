"""YAML files that are broken, unsafe or missing; malformed overrides."""

import re

import pytest

from maxpipe.config import ConfigError, load


def message(path, *words):
    with pytest.raises(ConfigError) as caught:
        load(path, words)
    return str(caught.value)


BROKEN = {  # text of a file: the error, a pattern
    "steps: 1\nsteps: 2\n": r"run.yml:2\): set twice, first at .*run.yml:1",
    "model: {num_layers: 4}\nmodel.num_layers: 4\n": "set twice",
    "steps: !!python/object/apply:os.getcwd []\n": "tag .* is not allowed",
    "steps: [1\n": r"not valid YAML: .*",
    "model:\n\tnum_layers: 4\n": r"run.yml:2.*: a tab where YAML allows only spaces",
    "- steps\n": "a mapping of keys to values",
    "x: &x {num_layers: 4}\nmodel:\n  <<: *x\n": "inherit with `base: other.yml`",
    "pipeline: {layers_per_stage: &x [*x]}\n": "nested too deeply",
    "steps: " + "[" * 5000: "not valid YAML",
    "optimzer:\n  name: adamw\n": r"optimzer .*did you mean optimizer\?$",
    "model: 7\n": "is a section; --help model lists its keys",
    "steps: {a: 1}\n": "takes a value, not a section",
    "steps:\n": "has no value",
    "base: [a.yml]\n": "the path of one YAML file",
}


def test_file_with_bad_yaml_is_refused(write):
    errors = {text: message(write("run.yml", text)) for text in BROKEN}
    unlike = {text: e for text, e in errors.items() if not re.search(BROKEN[text], e)}
    assert unlike == {}


def test_file_or_section_that_is_empty_is_accepted(write):
    assert load(write("empty.yml", "")).config.steps == 200
    assert load(write("section.yml", "model:\nsteps: 3\n")).config.steps == 3


def test_file_missing_names_the_nearest_also_in_another_case(base, write, tmp_path):
    assert f"the nearest are {base}" in message(str(tmp_path / "bse.yml"))
    path = write("tiny.yml", "steps: 3\n")
    assert f"the nearest are {path}, " in message(str(tmp_path / "TINY.yml"))


def test_base_missing_names_the_line(write):
    path = write("run.yml", "steps: 3\nbase: bases.yml\n")
    assert message(path).startswith(f"{path}:2: there is no file")


def test_base_in_a_circle_is_refused(write):
    write("a.yml", "base: b.yml\n")
    assert "inherit in a circle" in message(write("b.yml", "base: a.yml\n"))


def test_override_malformed_is_refused(base):
    table = {
        "steps": "not of the form key=value",
        "=5": "not of the form key=value",
        "other.yml": "'other.yml' is a second file; give one, which may inherit by `base: FILE`",
        "--steps=5": "without dashes: steps=5",
        "base=other.yml": "belongs in a YAML file",
        "steps=": "has no value",
        "pipeline.layers_per_stage=[1,": "not valid YAML",
        "model=[1]": "is a section",
        "steps={a: 1}": "takes a value",
    }
    errors = {word: message(base, word) for word in table}
    assert {word: error for word, error in errors.items() if table[word] not in error} == {}


def test_override_of_a_string_stays_as_written(base):
    words = [
        "run_name=007",
        "data.source=text",
        "data.path=/data/[a-c]*.txt",
        "compile.cache_dir='off'",
        "data.tokenizer=a=b.json",
    ]
    config = load(base, words).config
    assert config.run_name == "007"
    assert config.data.path == "/data/[a-c]*.txt"
    assert config.compile.cache_dir == "off"
    assert config.data.tokenizer == "a=b.json"
