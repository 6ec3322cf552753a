"""A plan's command line, with compilers that answer from a list."""

import json

import pytest

from maxpipe.compile import probing, proof
from maxpipe.plan import __main__ as command
from maxpipe.plan.search.probes import UnitFigures
from maxpipe.plan.search.rows import Proof

WORDS = [
    "configs/base.yml",
    "model.num_layers=8",
    "data.global_batch_size=32",
    "--fix",
    "pipeline.remat_policy=minimal",
    "--fix",
    "pipeline.num_microbatches=8",
    "--fix",
    "mesh.ici.stage=2",
    "--fix",
    "mesh.ici.fsdp=1",
]
TOPOLOGY = ["--topology", "v5p:2x2x1"]


@pytest.fixture
def compilers(monkeypatch):
    """Answer what is compiled; a list of what was, with the modules that it imports."""
    calls = []

    def figures(wanted, cache, note, imports):
        calls.append(("probe", imports))
        units = dict.fromkeys(wanted.units, UnitFigures(0.1, 1e6))
        return units | {f"B{wanted.chunks - 1}": UnitFigures(0.11, 1e6)}

    def compile_whole(text, note, imports):
        calls.append(("whole", imports))
        return Proof(1e9, float(len(calls)), True, "", 1.0)

    monkeypatch.setattr("maxpipe.compile.compilable.is_installed", lambda name: True)
    monkeypatch.setattr(probing, "probe_figures", figures)
    monkeypatch.setattr(proof, "compile_configuration", compile_whole)
    return calls


def test_probes_come_before_whole_steps(compilers, tmp_path, capsys):
    file, best = tmp_path / "plan.json", tmp_path / "best.yml"
    words = ["--probe", "2", "--compile", "1", "--json", str(file), "--write", str(best)]
    assert command.main([*WORDS, *TOPOLOGY, *words, "compile.cache_dir=off"]) == 0
    assert compilers == [("probe", ()), ("probe", ()), ("whole", ())]
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["basis"] == "compiled"
    assert {row["basis"] for row in rows[1:]} == {"probed", "scaled"}
    reasons = {row["basis"]: row["reason"] for row in rows}
    assert reasons["probed"].startswith("not compiled; by closed forms with compiled units ")
    assert reasons["scaled"].startswith("not probed, not compiled; by closed forms scaled as ")
    assert all(reason.count("not compiled") <= 1 for reason in reasons.values())
    assert "by the compiled program" in best.read_text()
    assert "by scaled: closed forms times" in capsys.readouterr().out


SMALLEST = ["--topology", "v5e", "--smallest", "--fix", "pipeline.schedule=lockstep_1f1b"]


def test_smallest_slice_is_the_first_on_which_what_is_compiled_fits(
    compilers, monkeypatch, tmp_path, capsys
):
    texts, file = [], tmp_path / "best.yml"

    def compile_whole(text, note, imports):
        texts.append(text)
        return Proof(2e10, 1.0, "topology: v5e:2x4" in text, "", 1.0)

    monkeypatch.setattr(proof, "compile_configuration", compile_whole)
    assert command.main([*WORDS, *SMALLEST, "--compile", "1", "--write", str(file)]) == 0
    assert ["topology: v5e:2x2" in text for text in texts] == [True, True, False]
    assert "topology: v5e:2x4" in file.read_text()
    printed = capsys.readouterr().out
    assert "nothing that was compiled fits v5e:2x2: the next slice" in printed
