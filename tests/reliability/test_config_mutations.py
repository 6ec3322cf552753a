"""A wrong configuration ends with exit code 2 and lines that name keys, never a traceback."""

import random
import re

import pytest
import yaml
from helpers.training_process import BASE, command, run

from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.train import main

VALUES = (
    *("0", "-1", "1", "3", "1e400", "-7", "7.5", "1k", "2Mi", "99999999999999999999", "nan", "inf"),
    *("true", "null", "~", "", "''", "abc", "../up", "/dev/null", "\u00e9\u2603", "2026-01-01"),
    *("[1, 2", "[a, [b]]", "{a: 1}", "[]", "${seed}", "${oc.env:HOME}", "${nowhere}", "0x10"),
    *("!!python/object/apply:os.system [ls]", "1_000", "a: b: c"),
)
# A run of a thousand layers is legal but too long for a test.
SMALL_VALUES = tuple(
    value for value in VALUES if value not in ("1k", "2Mi", "1_000", "99999999999999999999", "0x10")
)


def mutate(draw, values=VALUES):
    """Draw some words of a command line, most of them wrong."""
    keys = sorted({*OPTIONS, *SECTIONS})

    def key():
        name = draw.choice(keys)
        kind = draw.random()
        if kind < 0.7:
            return name
        if kind < 0.8:
            at = draw.randrange(len(name))
            return name[:at] + name[at + 1 :]
        if kind < 0.9:
            return name.replace(".", "_")
        return f"{name}.{draw.choice(keys)}"

    return [f"{key()}={draw.choice(values)}" for _ in range(draw.randint(1, 4))]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(1, 20))]
)
def test_train_mutated_command_runs_or_exits_with_2(tmp_path, seed):
    draw = random.Random(1000 + seed)
    words = [
        word for word in mutate(draw, SMALL_VALUES) if not word.startswith(("steps", "output_dir"))
    ]
    code, output = run(tmp_path / "log", command(tmp_path / "runs", *words, "steps=1"))
    assert "Traceback" not in output, (words, output)
    assert code in (0, 2), (words, output)
    if code == 2:
        assert "config error: " in output


def test_options_have_no_secret_keys():
    assert not [
        key
        for key in OPTIONS
        if re.search("(?<!per_)token$|secret|password|api_key|credential", key)
    ]


def test_print_config_shows_no_environment(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    with pytest.raises(SystemExit, match="0"):
        main([str(BASE), "--print-config"])
    shown = capsys.readouterr().out
    assert "secret-value" not in shown
    assert yaml.safe_load(shown)["run_name"] == "base"
