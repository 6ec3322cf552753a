"""Single units of the mpmd engine are compiled without the others."""

import json

import jax
import pytest

from maxpipe.compile import __main__ as command
from maxpipe.compile.programs import CompiledProgram
from maxpipe.compile.report import CompilerMemory
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.engines.mpmd.staged import UnitCompiler

WORDS = (
    "configs/base.yml",
    "compile.topology=cpu",
    "mesh.simulated_devices=8",
    "mesh.ici.data=4",
    "mesh.ici.stage=2",
    "mesh.ici.fsdp=1",
    "model.num_layers=2",
    "pipeline.num_repeats=1",
    "pipeline.num_microbatches=4",
    "pipeline.schedule=1f1b",
)


def test_offloaded_residuals_count_as_what_a_unit_works_with():
    memory = CompilerMemory(arguments=1, temp=20, program=300, results=4000)
    program = CompiledProgram(0, UnitName("F", 1), 4, memory, (), 50000, "")
    assert program.working == 50320


def test_only_the_named_units_are_compiled(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert command.main([*WORDS, "--units", "B0,F1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    # F1 and B0 read what F0 and B1 write, which are not there.
    assert [(unit["name"], unit["stage"]) for unit in report["units"]] == [("F1", 1), ("B0", 0)]
    assert {unit["seconds"] for unit in report["units"]} == {None}
    assert report["fits"] is True
    assert "no time, working " in capsys.readouterr().out


def test_a_unit_that_does_not_fit_is_named_in_the_report(tmp_path, monkeypatch, capsys):
    def compile_first(self, lowered, mesh):
        if "@jit_B1" in lowered.as_text():
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: memory required (24.90G) exceeds available HBM (15.75G)"
            )
        return compile_any(self, lowered, mesh)

    compile_any = UnitCompiler.compile
    monkeypatch.setattr(UnitCompiler, "compile", compile_first)
    file = tmp_path / "report.json"
    assert command.main([*WORDS, "--units", "B1,F1", "--json", str(file)]) == 3
    report = json.loads(file.read_text())
    assert report["fits"] is False
    assert report["too_large"] == {
        "name": "B1",
        "needed": pytest.approx(24.9 * 2**30),
        "available": 15.75 * 2**30,
    }
    assert [unit["name"] for unit in report["units"]] == ["F1"]
    assert "verdict     does not fit: B1 needs 24.9 GiB of 15.8 GiB" in capsys.readouterr().out
