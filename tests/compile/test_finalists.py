"""Finalists are compiled in processes of their own and ranked again."""

import argparse
import dataclasses
import re

import pytest
from helpers.small_plan import scaled

from maxpipe.compile import finalists as proving
from maxpipe.compile.finalists import finalists, prove
from maxpipe.compile.plan_launch import launch
from maxpipe.compile.step import UNREADABLE
from maxpipe.config import Config, ConfigError, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.best import make_plan
from maxpipe.plan.search.candidate import Proof
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.request import Request, placed
from maxpipe.render.plan_text import as_json, basis_lines, reason_text

SIZES = {"model.num_layers": 4, "data.global_batch_size": 16, "eval.every": 0}
SIZES |= {"model.num_query_heads": 2, "model.num_kv_heads": 2}  # of 128 channels


@pytest.fixture(scope="module")
def plan():
    config = replace(Config(), **SIZES)
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of("v5p:2x2x1", 1, config)
    config = placed(config, machine)
    choices = {"pipeline.schedule": ["lockstep_1f1b"], "pipeline.remat_policy": ["full"]}
    choices["pipeline.fsdp_gather"] = ["per_iteration"]
    own = update(config, {"compile.topology": "v6e:2x2", "mesh.ici.fsdp": 4})
    request = Request("base", own, config, machine, (16,), choices, 0.1)
    return make_plan(request, Facts(config), compare=True)


@pytest.fixture
def ranked(plan, monkeypatch):
    """ranked(answers, count): the plan with its best rows compiled to these proofs in order."""

    def _ranked(answers, count, **changes):
        left = [*answers]

        def answer(text, note, imports):
            assert "topology: v5p:2x2x1" in text
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(proving, "compile_configuration", answer)
        return prove(dataclasses.replace(plan, **changes), count, lambda line: None)

    return _ranked


def proved(seconds, *, fits=True, failure="", parts=None):
    return Proof(1e9, seconds, fits, failure, 1.0, parts)


def test_the_compilers_fastest_wins_over_the_closed_forms(plan, ranked):
    found = ranked([proved(3.0), proved(1.0), proved(2.0)], 3)
    assert [row.seconds for row in found.rows[:3]] == [1.0, 2.0, 3.0]
    assert found.winner.candidate == finalists(plan.rows)[1].candidate
    assert found.winner.reason == ""
    assert found.rows[1].reason.startswith("+100.0%")
    for row in found.rows[3:]:
        assert re.match(r"not compiled; by closed forms (\+|as fast|\d)", reason_text(found, row))


def test_what_was_not_compiled_is_compared_with_the_chosen_row_by_closed_forms_alone(plan, ranked):
    assert plan.own.config.compile.topology == "v5p:2x2x1"
    assert ranked([proved(2.0), proved(1.0)], 1).own.reason == "50.0% faster"
    found = ranked([proved(1000.0), proved(999.0)], 2)
    assert found.winner.candidate == finalists(plan.rows)[1].candidate
    rows = as_json(found)["rows"]
    assert rows[1]["relative_time"] == pytest.approx(1000 / 999)
    closed = found.winner.candidate.per_sequence
    for row, data in zip(found.rows[2:], rows[2:], strict=True):
        assert data["relative_time"] == pytest.approx(row.candidate.per_sequence / closed)
        (share,) = re.findall(r"([\d.]+)%", data["reason"]) or ["0"]
        sign = -1 if data["reason"].endswith("faster") else 1
        assert sign * float(share) == pytest.approx(100 * (data["relative_time"] - 1), abs=0.051)


def of_engine(row, engine):
    return dataclasses.replace(row, candidate=dataclasses.replace(row.candidate, engine=engine))


def test_the_best_of_another_engine_is_compiled_second_unless_it_is_far_slower(plan):
    def order(slower):
        best = of_engine(plan.rows[0], "scheduled")
        rows = [dataclasses.replace(best, reason=str(number)) for number in range(5)]
        for number, scale in slower.items():
            rows[number] = scaled(of_engine(rows[number], "circular"), scale)
        return [int(row.reason) for row in finalists(rows)]

    assert order({}) == order({4: 1.3}) == [0, 1, 2, 3, 4]
    assert order({3: 1.1, 4: 1.1}) == [0, 3, 1, 2, 4]


def test_a_loop_over_the_layers_of_the_best_is_compiled_after_others_that_are_near(plan):
    def order(slower):
        rows = [row for row in plan.rows if row.candidate.engine == "scheduled"][:4]
        scales = [(1 + n / 1000) / row.candidate.seconds.step for n, row in enumerate(rows)]
        rows = [scaled(row, scale) for row, scale in zip(rows, scales, strict=True)]
        rows = [dataclasses.replace(row, reason=str(n)) for n, row in enumerate(rows)]
        assert len({row.candidate.sort for row in rows}) == 4
        twin = dataclasses.replace(rows[0].candidate, scans=not rows[0].candidate.scans)
        rows[1] = dataclasses.replace(rows[0], candidate=twin, reason="1")
        for number, scale in slower.items():
            rows[number] = scaled(rows[number], scale)
        rows.sort(key=lambda row: row.per_sequence)
        return [int(row.reason) for row in finalists(rows)]

    assert order({}) == [0, 2, 3, 1]
    assert order({3: 1.3}) == [0, 2, 1, 3]
    assert order({2: 1.3}) == [0, 3, 1, 2]


def test_rows_that_are_compiled_out_of_turn_are_listed_once(plan, ranked):
    rows = [of_engine(row, "scheduled") for row in plan.rows]
    scale = rows[0].seconds / rows[3].seconds
    moved = rows[3] = scaled(of_engine(rows[3], "circular"), scale)
    found = ranked([proved(2.0), proved(1.0)], 2, rows=rows)
    assert found.rows[0].candidate is moved.candidate
    assert found.uncompiled == len(rows) - 2
    left = [row.candidate for row in [*rows[1:3], *rows[4:]]]
    assert [row.candidate for row in found.rows[2:]] == left
    # A single one is the best that fits.
    one = ranked([proved(2.0, fits=False), proved(1.0)], 1, rows=rows)
    assert one.winner.candidate is rows[1].candidate


def test_compiled_rows_show_the_compilers_parts_and_lose_by_them(ranked):
    answers = [proved(1.0, parts=Seconds(0.8, 0.1, 0.1)), proved(1.5, parts=Seconds(0.8, 0.1, 0.6))]
    found = ranked(answers, 2)
    assert [row.parts for row in found.rows[:2]] == [answer.parts for answer in answers]
    assert found.rows[1].reason == "+50.0%: bubble"
    assert as_json(found)["rows"][0]["proof"]["parts"]["communication"] == 0.1
    # What was not compiled is compared by closed forms, which know other losses.
    closed = found.rows[2]
    assert closed.parts == closed.candidate.seconds


BROKEN = proved(None, fits=False, failure="not compiled: broken")


def test_what_the_compiler_finds_too_large_or_refuses_is_replaced_by_the_next(ranked):
    found = ranked([proved(0.1, fits=False), proved(2.0), BROKEN], 1)
    assert found.winner.seconds == 2.0
    assert "the program needs" in found.misfits[-1].reason
    found = ranked([proved(0.1, fits=False), BROKEN], 1)
    assert found.winner is None
    assert found.misfits[-1].reason == BROKEN.failure
    with pytest.raises(ConfigError, match="--compile: not compiled: broken"):
        ranked([BROKEN], 1)


def test_a_plan_is_by_closed_forms_where_jax_cannot_read_what_libtpu_compiles(plan, ranked):
    unreadable = proved(None, fits=False, failure=f"not compiled: {UNREADABLE} (a reason); ...")
    assert ranked([unreadable, proved(1.0)], 2).rows == plan.rows
    assert ranked([proved(0.1, fits=False), unreadable, proved(1.0)], 1).rows == plan.rows
    found = ranked([proved(1.0), unreadable, proved(0.5)], 2)
    assert [row.seconds for row in found.rows[:1]] == [1.0]


def test_rows_fit_without_the_compilers_estimate_of_time(plan, ranked):
    found = ranked([proved(None)], 1)
    assert found.winner.memory == 1e9
    assert found.winner.seconds == plan.rows[0].seconds
    assert basis_lines(found)[0].startswith("no compiler's estimate of time for this chip")


def test_offloading_is_said_to_have_no_price(plan, capsys):
    choices = {**plan.request.choices, "pipeline.remat_policy": ["minimal_offloaded"]}
    flags = argparse.Namespace(compile=0, compare=False, json=None, html=None, write=None)
    assert launch(dataclasses.replace(plan.request, choices=choices), flags, []) == 0
    assert "transfers to the host's memory are not in these seconds" in capsys.readouterr().out
