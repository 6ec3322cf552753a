"""Test scripts/benchmark/plan_accuracy.py with a compiler that answers from a list."""

import json
import sys
from pathlib import Path

import pytest
from helpers.scripts import load_script

from maxpipe.plan.search.candidate import Proof

script = load_script("benchmark/plan_accuracy")
BASE = Path(__file__).parents[2] / "configs" / "base.yml"
PROOF = Proof(2.0**30, 0.25, True, "", 1.0)


@pytest.fixture
def run(monkeypatch, capsys):
    """run(words): run the script; return what it printed."""

    def _run(*words):
        monkeypatch.setattr(sys, "argv", ["x", str(BASE), "data.sequence_length=64", *words])
        script.main()
        return capsys.readouterr().out

    return _run


def test_a_run_goes_on_where_it_stopped_and_compiles_nothing_twice(run, tmp_path, monkeypatch):
    compiled = []

    def compile_configuration(text, note):
        if len(compiled) == 2:
            raise KeyboardInterrupt
        compiled.append(text)
        return PROOF._replace(seconds=0.25 * len(compiled))

    file = tmp_path / "drawn.json"
    words = ["--topology", "v5p:2x2x1", "--count", "3", "--results", str(file)]
    monkeypatch.setattr(script, "compile_configuration", compile_configuration)
    with pytest.raises(KeyboardInterrupt):
        run(*words)
    assert "2 of 3 compiled" in run(*words, "--stored")
    first = compiled.pop(0)  # what is stored is not compiled again, and the third one is
    lines = run(*words).splitlines()
    assert first not in compiled
    assert "3 of 3 compiled" in lines
    assert "slower than the fastest compiled" in lines[-2]
    assert lines[-1].endswith("slowest / fastest 2.00")
    found = json.loads(file.read_text())["candidates"]
    assert [entry["seconds"] for entry in found] == [0.25, 0.5, 0.5]
    with pytest.raises(SystemExit, match=r"not of .*; give the same flags"):
        run(*words, "--seed", "2")
