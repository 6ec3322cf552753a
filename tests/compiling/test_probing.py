"""Rows of a plan are ranked by probes, which many of them share."""

import statistics

import pytest

from maxpipe.compiling import probing
from maxpipe.compiling.probing import ROWS, probe
from maxpipe.compiling.units import TooLarge
from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.plan import make_plan
from maxpipe.planning.search.probes import UnitFigures
from maxpipe.planning.search.request import Request, shared_config


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

    def figures(wanted, cache, note, imports):
        compiled.append(wanted)
        answer = seconds_of(wanted.config.mesh.ici)
        if not isinstance(answer, float):
            return answer
        last = f"B{wanted.chunks - 1}"
        units = dict.fromkeys(wanted.units, UnitFigures(answer, 1e6))
        return units | {last: UnitFigures(1.1 * answer, 1e6)}

    monkeypatch.setattr(probing, "probe_figures", figures)
    return compiled


def silent(line):
    """Print nothing."""


def test_rows_are_ranked_by_their_probes(plan, monkeypatch):
    slower = plan.winner.candidate.grid.size("tensor")
    compiling(monkeypatch, lambda mesh: 1.0 if mesh.tensor == slower else 0.1)
    ranked = probe(plan, 10, None, silent)
    assert ranked.winner.candidate.grid.size("tensor") != slower
    assert ranked.winner.basis == "probed"
    times = [row.per_sequence for row in ranked.rows]
    assert times == sorted(times)
    assert len(times) == len(plan.rows)
    assert ranked.winner.reason == ""
    assert all(row.reason for row in ranked.rows[1:])
    assert ranked.rows[-1].reason.startswith("+")


def test_rows_without_a_probe_are_ranked_by_closed_forms_scaled_as_those_probed(plan, monkeypatch):
    slower = plan.winner.candidate.grid.size("tensor")
    compiling(monkeypatch, lambda mesh: 1.0 if mesh.tensor == slower else 0.1)
    ranked = probe(plan, 2, None, silent)
    probed = [row for row in ranked.rows if row.basis == "probed"]
    others = [row for row in ranked.rows if row.basis != "probed"]
    assert probed
    ratios = [row.seconds / float(row.candidate.seconds.step) for row in probed]
    for row in others:
        expected = statistics.median(ratios) * float(row.candidate.seconds.step)
        assert row.seconds == pytest.approx(expected)
        assert row.basis == "scaled"
        assert row.unprobed
    # Some of them are faster than the slowest probed one.
    assert [row.basis for row in ranked.rows] != ["probed"] * len(probed) + ["scaled"] * len(others)
    assert ranked.own.scale == pytest.approx(statistics.median(ratios))


def test_a_unit_that_does_not_fit_makes_its_rows_misfits(plan, monkeypatch):
    compiling(monkeypatch, lambda mesh: TooLarge("B1", 3e11, 1e11))
    lines = []
    ranked = probe(plan, 100, None, lines.append)
    assert len(ranked.rows) == len(plan.rows[ROWS:])
    reasons = {row.reason for row in ranked.misfits if row.probed}
    assert reasons == {"does not fit: B1 of its probe needs 279 GiB"}
    assert any("B1 of its probe needs 279 GiB" in line for line in lines)
    assert {row.basis for row in [*ranked.rows, *ranked.misfits]} == {"closed"}
