"""Test scripts/benchmark/plan_accuracy.py with a compiler that answers from a list."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from maxpipe.plan.search.candidate import Proof

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark" / "plan_accuracy.py"
BASE = Path(__file__).parents[2] / "configs" / "base.yml"
WORDS = ["--topology", "v5p:2x2x1", "--count", "3", "data.sequence_length=64"]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("plan_accuracy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_run_goes_on_where_it_stopped_and_compiles_nothing_twice(
    script, tmp_path, monkeypatch, capsys
):
    compiled: list[str] = []

    def compile_configuration(text: str, note: object) -> Proof:
        if len(compiled) == 2:
            raise KeyboardInterrupt
        compiled.append(text)
        return Proof(2.0**30, 0.25 * len(compiled), True, "", 1.0)

    def run(*more: str) -> None:
        words = ["x", str(BASE), *WORDS, "--results", str(tmp_path / "drawn.json"), *more]
        monkeypatch.setattr(sys, "argv", words)
        script.main()

    monkeypatch.setattr(script, "compile_configuration", compile_configuration)
    with pytest.raises(KeyboardInterrupt):
        run()
    run("--stored")
    assert "2 of 3 compiled" in capsys.readouterr().out
    first = compiled.pop(0)  # what is stored is not compiled again, and the third one is
    run()
    assert first not in compiled
    lines = capsys.readouterr().out.splitlines()
    assert "3 of 3 compiled" in lines
    assert "slower than the fastest compiled" in lines[-2]
    assert lines[-1].endswith("slowest / fastest 2.00")
    found = json.loads((tmp_path / "drawn.json").read_text())["candidates"]
    assert [entry["seconds"] for entry in found] == [0.25, 0.5, 0.5]

    with pytest.raises(SystemExit, match=r"not of .*; give the same flags"):
        run("--seed", "2")


def test_stored_without_a_file_is_a_mistake(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", str(BASE), *WORDS, "--stored"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--stored needs --results FILE" in capsys.readouterr().err


def test_as_many_candidates_are_drawn_of_each_engine_if_asked_for(script, monkeypatch, capsys):
    proof = Proof(2.0**30, 0.25, True, "", 1.0)
    monkeypatch.setattr(script, "compile_configuration", lambda text, note: proof)

    def engines(*more: str) -> dict[str, int]:
        words = ["x", str(BASE), "--topology", "v6e:2x2", "--count", "8", *more]
        monkeypatch.setattr(sys, "argv", [*words, "data.sequence_length=64"])
        script.main()
        rows = [line for line in capsys.readouterr().out.splitlines() if " M=" in line]
        kinds = {
            "sequential": "sequential",
            "lockstep_1f1b": "scheduled",
            "lockstep_zb": "scheduled",
        }
        kinds |= {"circular": "circular"}
        names = [
            next((kinds[w] for w in row.replace(",", "").split() if w in kinds), "others")
            for row in rows
        ]
        return {name: names.count(name) for name in names}

    each = engines("--per-engine")
    assert each["sequential"] == each["scheduled"] == 2
    assert engines()["sequential"] == 1
