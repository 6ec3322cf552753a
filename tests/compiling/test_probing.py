"""Rows of a plan are ranked by probes, which many of them share."""

import dataclasses
import statistics

import pytest

from maxpipe.compiling import probing
from maxpipe.compiling.probing import ROWS, probe, progress_bar
from maxpipe.compiling.units import TooLarge
from maxpipe.config import Config, ConfigError, Problem, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.plan import make_plan
from maxpipe.planning.search.probes import Probing, UnitFigures
from maxpipe.planning.search.request import Request, shared_config
from maxpipe.render.plan_notes import basis_lines
from maxpipe.render.plan_table import as_json, table_lines


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


def test_schedules_of_one_mesh_share_a_probe(plan, monkeypatch):
    compiled = compiling(monkeypatch, lambda mesh: 0.1)
    probe(plan, 100, None, silent)
    texts = [wanted.text() for wanted in compiled]
    assert len(texts) == len(set(texts)) < len(plan.rows[:ROWS])


def test_no_more_probes_are_compiled_than_asked_for(plan, monkeypatch):
    compiled = compiling(monkeypatch, lambda mesh: 0.1)
    lines = []
    ranked = probe(plan, 1, None, lines.append)
    assert len(compiled) == 1
    assert {row.basis for row in ranked.rows} == {"probed", "scaled"}
    assert "--probe 1 left it out" in {row.unprobed for row in ranked.rows}
    assert any(line.startswith("probing     [....................] 0 of 1") for line in lines)


def test_what_cannot_be_compiled_leaves_closed_forms(plan, monkeypatch):
    compiling(monkeypatch, lambda mesh: "config error: broken")
    lines = []
    ranked = probe(plan, 10, None, lines.append)
    assert [row.candidate for row in ranked.rows] == [row.candidate for row in plan.rows]
    assert {row.basis for row in ranked.rows} == {"closed"}
    assert "            config error: broken" in lines
    assert "not probed: config error: broken" in table_lines(ranked)[2]


def test_rows_that_do_not_fit_by_their_probes_leave_their_places_to_the_others(plan, monkeypatch):
    compiling(monkeypatch, lambda mesh: 0.1)
    request = dataclasses.replace(plan.request, margin=1 - 1e-6)
    closed = [dataclasses.replace(row, candidate=tiny(row.candidate)) for row in plan.rows]
    ranked = probe(dataclasses.replace(plan, request=request, rows=closed), 1, None, silent)
    misfits = [row for row in ranked.misfits if row.probed]
    assert misfits
    assert {row.reason for row in misfits} == {"does not fit by its probe"}
    assert len(ranked.rows) == len(plan.rows) - len(misfits)
    assert {row.basis for row in ranked.rows} == {"scaled"}
    assert not {id(row.config) for row in ranked.rows} & {id(row.config) for row in misfits}


def tiny(candidate):
    """Return a candidate that needs a byte by its closed form."""
    return dataclasses.replace(candidate, memory=1.0)


def test_a_unit_that_does_not_fit_makes_its_rows_misfits(plan, monkeypatch):
    compiling(monkeypatch, lambda mesh: TooLarge("B1", 3e11, 1e11))
    lines = []
    ranked = probe(plan, 100, None, lines.append)
    assert len(ranked.rows) == len(plan.rows[ROWS:])
    reasons = {row.reason for row in ranked.misfits if row.probed}
    assert reasons == {"does not fit: B1 of its probe needs 279 GiB"}
    assert any("B1 of its probe needs 279 GiB" in line for line in lines)
    assert {row.basis for row in [*ranked.rows, *ranked.misfits]} == {"closed"}


def test_rows_without_stages_are_not_probed(plan, monkeypatch):
    compiled = compiling(monkeypatch, lambda mesh: 0.1)
    candidate = dataclasses.replace(plan.winner.candidate, engine="sequential")
    row = dataclasses.replace(plan.winner, candidate=candidate)
    lines = []
    alone = dataclasses.replace(plan, rows=[row])
    assert probe(alone, 10, None, lines.append) is alone
    assert not compiled
    assert lines == [
        "probing     1 of 1 rows have no probe: without stages, compiling the step takes no "
        "longer than a probe"
    ]


def test_a_row_whose_probe_is_refused_says_why(plan, monkeypatch):
    def refuse(self, config, facts, machine):
        raise ConfigError(Problem("model.layer_pattern", "is not repeated"))

    monkeypatch.setattr(probing.Probing, "__init__", refuse)
    lines = []
    assert probe(plan, 10, None, lines.append) is plan
    assert lines == [
        f"probing     {ROWS} of {ROWS} rows have no probe: model.layer_pattern: is not repeated"
    ]


def test_a_step_that_cannot_be_composed_leaves_its_row_unprobed(plan, monkeypatch):
    def fail(self, figures):
        raise ScheduleError("schedule: stage 0 waits for ever")

    compiling(monkeypatch, lambda mesh: 0.1)
    monkeypatch.setattr(Probing, "seconds", fail)
    ranked = probe(plan, 10, None, silent)
    assert len(ranked.rows) == len(plan.rows)
    assert ranked.winner.unprobed == "schedule: stage 0 waits for ever"


def test_a_cache_that_cannot_be_written_is_said_once(plan, monkeypatch, tmp_path):
    compiling(monkeypatch, lambda mesh: 0.1)
    (tmp_path / "probes").write_text("a file")
    lines = []
    probe(plan, 10, tmp_path, lines.append)
    assert sum("figures are not kept" in line for line in lines) == 1


@pytest.mark.parametrize(("each", "left"), [(10.0, "20 s"), (300.0, "10 min")])
def test_time_left_is_said_in_seconds_below_a_minute(plan, monkeypatch, each, left):
    now = [0.0]
    monkeypatch.setattr(probing.time, "perf_counter", lambda: now[0])

    def pass_time(mesh):
        now[0] += each
        return 0.1

    compiling(monkeypatch, pass_time)
    lines = []
    probe(plan, 3, None, lines.append)
    assert any(f"1 of 3, about {left} left" in line for line in lines)


def test_the_table_says_what_seconds_rest_on(plan, monkeypatch):
    assert "  closed  " in table_lines(plan)[1]
    compiling(monkeypatch, lambda mesh: 0.1)
    ranked = probe(plan, 1, None, silent)
    assert any("  probed  " in line for line in table_lines(ranked))
    assert any("  scaled  " in line for line in table_lines(ranked))
    basis = "\n".join(basis_lines(ranked))
    assert "by probed: closed forms in which compiled units" in basis
    assert "by scaled: closed forms times " in basis
    rows = as_json(ranked)["rows"]
    row = next(row for row in rows if row["basis"] == "probed")
    assert row["probed_seconds"] == row["predicted_step_seconds"] != row["closed_form_seconds"]
    row = next(row for row in rows if row["basis"] == "scaled")
    scaled = row["closed_form_seconds"] * row["closed_form_scale"]
    assert row["predicted_step_seconds"] == pytest.approx(scaled, rel=1e-9)
    assert row["unprobed"]


def test_a_progress_bar_fills():
    assert progress_bar(0, 3) == "." * 20
    assert progress_bar(1, 2) == "#" * 10 + "." * 10
    assert progress_bar(3, 3) == "#" * 20
