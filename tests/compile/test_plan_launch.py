"""A plan's command line, with compilers that answer from a list."""

import json

import pytest

from maxpipe.compile import finalists as proving
from maxpipe.compile.step import UNREADABLE
from maxpipe.config import Config, ConfigError
from maxpipe.plan import __main__ as command
from maxpipe.plan.__main__ import number_compiled
from maxpipe.plan.search.candidate import Proof
from maxpipe.plan.search.machine import machine_of

WORDS = [
    *("configs/base.yml", "model.num_layers=8", "data.global_batch_size=32"),
    *("--fix", "pipeline.remat_policy=minimal", "--fix", "pipeline.num_microbatches=8"),
    *("--fix", "mesh.ici.stage=2", "--fix", "mesh.ici.fsdp=1"),
]
TOPOLOGY = ["--topology", "v5p:2x2x1"]


@pytest.fixture
def compiled(monkeypatch):
    calls = []

    def compile_whole(text, note, imports):
        calls.append((text, imports))
        return Proof(1e9, float(len(calls)), "topology: v5e:2x2" not in text, "", 1.0)

    monkeypatch.setattr(command, "is_installed", lambda name: True)
    monkeypatch.setattr(proving, "compile_configuration", compile_whole)
    return calls


def test_rows_that_were_not_compiled_are_compared_by_closed_forms(compiled, tmp_path):
    file, best = tmp_path / "plan.json", tmp_path / "best.yml"
    words = ["--compile", "1", "--json", str(file), "--write", str(best)]
    assert command.main([*WORDS, *TOPOLOGY, *words]) == 0
    assert [imports for _, imports in compiled] == [()]
    first, *others = json.loads(file.read_text())["rows"]
    assert first["basis"] == "compiled"
    assert {row["basis"] for row in others} == {"closed"}
    assert all(row["reason"].startswith("not compiled; by closed forms ") for row in others)
    assert "by the compiled program" in best.read_text()


def test_a_libtpu_that_jax_cannot_read_is_tried_once(compiled, monkeypatch, tmp_path, capsys):
    unreadable = Proof(None, None, False, f"not compiled: {UNREADABLE} (a reason)", 1.0)
    calls, file = [], tmp_path / "best.yml"
    monkeypatch.setattr(
        proving, "compile_configuration", lambda *given: calls.append(given) or unreadable
    )
    assert command.main([*WORDS, *TOPOLOGY, "--write", str(file)]) == 0
    assert len(calls) == 1
    printed = capsys.readouterr().out
    assert "closed forms alone" in printed
    assert "compile:" in file.read_text()


SMALLEST = ["--topology", "v5e", "--smallest", "--fix", "pipeline.schedule=lockstep_1f1b"]


def test_smallest_slice_is_the_first_on_which_what_is_compiled_fits(compiled, tmp_path, capsys):
    file = tmp_path / "best.yml"
    assert command.main([*WORDS, *SMALLEST, "--compile", "1", "--write", str(file)]) == 0
    assert ["topology: v5e:2x2" in text for text, _ in compiled] == [True, True, False]
    assert "topology: v5e:2x4" in file.read_text()
    printed = capsys.readouterr().out
    assert "nothing that was compiled fits v5e:2x2: the next slice" in printed


def test_what_nothing_compiles_for_is_refused_where_it_is_asked_for(monkeypatch):
    def number(topology, given=None):
        return number_compiled(given, machine_of(topology, 1, Config()))

    monkeypatch.setattr(command, "is_installed", lambda name: True)
    assert (number("v5p:2x2x1"), number("v5p:2x2x1", 0), number("v5p:2x2x1", 5)) == (3, 0, 5)
    for topology in ("cpu:4", "H100:4"):
        number(topology)
        with pytest.raises(ConfigError, match=f"no compiler at hand for {topology}; leave it out"):
            number(topology, 2)
    monkeypatch.setattr(command, "is_installed", lambda name: False)
    with pytest.raises(ConfigError, match="--compile: needs libtpu: pip install "):
        number("v5p:2x2x1")
    assert number("v5p:2x2x1", 0) == 0
