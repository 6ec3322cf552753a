"""Rows of a plan are ranked by probes, which many of them share."""

import dataclasses

import pytest

from maxpipe.compiling import probing
from maxpipe.compiling.probing import ROWS, probe, progress_bar
from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.plan import make_plan
from maxpipe.planning.search.probes import UnitFigures
from maxpipe.planning.search.request import Request, shared_config
from maxpipe.render.plan_table import as_json, basis_lines, table_lines


@pytest.fixture(scope="module")
def plan():
    sizes = {"model.num_layers": 8, "data.global_batch_size": 32, "eval.every": 0}
    config = replace(Config(), **sizes)
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of("v5p:2x2x1", 1, config)
    shared = shared_config(config, machine)
    choices = {
        "pipeline.remat_policy": ["minimal"],
        "pipeline.num_microbatches": [8],
        "mesh.ici.stage": [2],
        "mesh.ici.fsdp": [1],
        "mesh.ici.context": [1],
        "pipeline.num_repeats": [1],
        "model.logit_tiles": [1],
    }
    own = update(shared, {"mesh.ici.stage": 2, "mesh.ici.tensor": 2, "mesh.ici.fsdp": 1})
    request = Request("base", own, shared, machine, (32,), choices, 0.1)
    return make_plan(request, Facts(shared), compare=True)


def compiling(monkeypatch, seconds_of):
    """Compile probes to units of so many seconds, by their mesh; return those compiled."""
    compiled = []

    def figures(wanted, cache, note):
        compiled.append(wanted)
        seconds = seconds_of(wanted.config.mesh.ici)
        if isinstance(seconds, str):
            return seconds
        return dict.fromkeys(wanted.units, UnitFigures(seconds, 1e6))

    monkeypatch.setattr(probing, "probe_figures", figures)
    return compiled


def test_rows_are_ranked_by_their_probes(plan, monkeypatch):
    slower = plan.winner.candidate.grid.size("tensor")
    compiling(monkeypatch, lambda mesh: 1.0 if mesh.tensor == slower else 0.1)
    ranked = probe(plan, 10, None, lambda line: None)
    assert ranked.winner.candidate.grid.size("tensor") != slower
    probed = [row for row in ranked.rows if row.basis == "probed"]
    assert [*ranked.rows[: len(probed)]] == probed
    assert len(probed) == ROWS
    times = [row.per_sequence for row in probed]
    assert times == sorted(times)
    assert probed[-1].reason.startswith("+")


def test_schedules_of_one_mesh_share_a_probe(plan, monkeypatch):
    compiled = compiling(monkeypatch, lambda mesh: 0.1)
    probe(plan, 100, None, lambda line: None)
    texts = [wanted.text() for wanted in compiled]
    assert len(texts) == len(set(texts)) < len(plan.rows[:ROWS])


def test_no_more_probes_are_compiled_than_asked_for(plan, monkeypatch):
    compiled = compiling(monkeypatch, lambda mesh: 0.1)
    lines = []
    ranked = probe(plan, 1, None, lines.append)
    assert len(compiled) == 1
    bases = [row.basis for row in ranked.rows]
    assert bases == sorted(bases, reverse=True)  # probed ones first
    assert {*bases} == {"probed", "closed"}
    assert all("not probed" in row.reason for row in ranked.rows if row.basis == "closed")
    assert lines[0].startswith("probing     [....................] 0 of 1")


def test_what_cannot_be_compiled_leaves_closed_forms(plan, monkeypatch):
    compiling(monkeypatch, lambda mesh: "config error: broken")
    lines = []
    ranked = probe(plan, 10, None, lines.append)
    assert [row.candidate for row in ranked.rows] == [row.candidate for row in plan.rows]
    assert {row.basis for row in ranked.rows} == {"closed"}
    assert "not probed: config error: broken" in lines[1]


def test_what_does_not_fit_by_its_probe_is_not_chosen(plan, monkeypatch):
    compiling(monkeypatch, lambda mesh: 0.1)
    request = dataclasses.replace(plan.request, margin=1 - 1e-6)
    ranked = probe(dataclasses.replace(plan, request=request), 1, None, lambda line: None)
    assert {row.basis for row in ranked.rows} == {"closed"}


def test_the_table_says_what_seconds_rest_on(plan, monkeypatch):
    assert "  closed  " in table_lines(plan)[1]
    compiling(monkeypatch, lambda mesh: 0.1)
    ranked = probe(plan, 10, None, lambda line: None)
    assert "  probed  " in table_lines(ranked)[1]
    assert any("probed: closed forms in which compiled units" in x for x in basis_lines(ranked))
    row = as_json(ranked)["rows"][0]
    assert row["basis"] == "probed"
    assert row["probed_seconds"] == row["predicted_step_seconds"] != row["closed_form_seconds"]


def test_a_progress_bar_fills():
    assert progress_bar(0, 3) == "." * 20
    assert progress_bar(1, 2) == "#" * 10 + "." * 10
    assert progress_bar(3, 3) == "#" * 20
