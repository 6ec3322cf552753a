"""Command lines: exit codes, output to stdout and stderr, errors before JAX is imported, help."""

import re

import pytest
from helpers.commands import exit_code

from maxpipe import train
from maxpipe.config import ConfigError
from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.cli import parse_args
from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.config.printing import describe


def parse(*words):
    return parse_args(words, prog="prog", description="Does it.")


def test_key_in_two_words_is_refused(base):
    table = {
        ("data.path=a", "data.path=b"): "data.path=a,b",
        ("data.path=a", "steps=7", "data.path=b"): "data.path=a,b",
        ("steps=6", "seed=1", "steps=7"): "give it once",
        ("model.num_layers=8", "model={num_layers: 8}"): "give it once",
    }
    for words, remedy in table.items():
        key = words[0].partition("=")[0]
        with pytest.raises(ConfigError, match=f"^{key}.* set twice.*{remedy}"):
            parse(base, *words)


def test_command_with_problems_prints_all_and_exits_with_2(base, capsys):
    assert exit_code(train.main, [base, "stepz=7", "model.num_layers=9", "--print-confg"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (out, lines[-1]) == ("", "3 problems found"), err
    assert all(line.startswith("config error: ") for line in lines[:-1])
    assert "config error: stepz (command line): unknown key; did you mean steps?" in lines


def test_parse_args_refuses_with_what_to_give():
    table = {
        "": "no config file: prog CONFIG.yml key=value",
        "steps=3": "no config file",
        "nowhere.yml": "there is no file nowhere.yml; the nearest are configs/",
        "configs/base.yml --steps=5": "written without dashes: steps=5",
        "configs/base.yml --global-batch-size=8": "data.global_batch_size=8 or eval.global_batch_",
        "configs/base.yml --print": "the flags are --print-config, --help",
    }
    problems = {}
    for words in table:
        with pytest.raises(ConfigError) as caught:
            parse(*words.split())
        (problem,) = caught.value.problems
        problems[words] = str(problem)
    assert {w: text for w, text in problems.items() if table[w] not in text} == {}


def test_parse_args_help_prints_and_exits(capsys):
    table = {
        "--help": ["usage: prog"],
        "--help configs/base.yml": ["usage: prog"],
        "--help optimizer.name": [
            "optimizer.name: optimizer",
            "default     'adamw'",
            "choices     adafactor, adamw, lion, muon, sgd",
        ],
        "--help mesh.ici": ["mesh.ici.stage", "pipeline stages"],
    }
    for words, parts in table.items():
        with pytest.raises(SystemExit, match="0"):
            parse(*words.split())
        printed = capsys.readouterr().out
        assert [part for part in parts if part not in printed] == [], words


def test_describe_knows_every_key_section_and_variant():
    for key in OPTIONS:
        assert describe(key).startswith(f"{key}: {OPTIONS[key].bounds.help}")
    assert [section for section in SECTIONS if f"{section}." not in describe(section)] == []
    for pattern in (
        r"^data\.source +one of array_record, chat, datasets, datasets_chat, jsonl",
        r"^data\.eval_fraction +float; default \S+, >= 0 and <= 0\.5$",
        r"^data\.path +str; default ''$",
    ):
        assert re.search(pattern, describe("data"), re.M)
    text = describe("pipeline.schedule")
    for name, schedule in SCHEDULES.items():
        line = rf"^ +{name} +{re.escape(schedule.summary)} \({', '.join(schedule.engines)}\)$"
        assert re.search(line, text, re.M), name
    assert {describe(key) in describe("every") for key in ("eval.every", "checkpoint.every")} == {
        True
    }


def test_print_config_prints_and_exits_without_the_secret_in_a_url(base, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(base, "steps=9", "checkpoint.mirror=s3://me:pass-word@bucket/runs", "--print-config")
    printed = capsys.readouterr().out
    assert "steps: 9                                      # command line" in printed
    assert "mirror: s3://***@bucket/runs" in printed
    assert "pass-word" not in printed
