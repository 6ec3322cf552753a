"""Finalists are compiled in processes of their own and ranked again."""

import pytest

from maxpipe.compiling import proof
from maxpipe.compiling.proof import compile_configuration, prove
from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.plan import make_plan
from maxpipe.planning.search.request import Request
from maxpipe.planning.search.rows import Proof

SIZES = {"model.num_layers": 4, "data.global_batch_size": 16, "eval.every": 0}


@pytest.fixture(scope="module")
def plan():
    config = replace(Config(), **SIZES)
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of("v5p:2x2x1", 1, config)
    choices = {"pipeline.schedule": ["lockstep_1f1b"], "pipeline.remat_policy": ["full"]}
    request = Request("base", config, config, machine, (16,), choices, 0.1)
    return make_plan(request, Facts(config))


def compiled(monkeypatch, answers):
    """Answer compilations with these proofs, in their order."""
    left = [*answers]
    monkeypatch.setattr(proof, "compile_configuration", lambda text, note: left.pop(0))


def proved(seconds, *, fits=True, failure=""):
    return Proof(1e9, seconds, fits, failure, 1.0)


def test_the_compilers_fastest_wins_over_the_closed_forms(plan, monkeypatch):
    compiled(monkeypatch, [proved(3.0), proved(1.0), proved(2.0)])
    ranked = prove(plan, 3, lambda line: None)
    assert [row.seconds for row in ranked.rows[:3]] == [1.0, 2.0, 3.0]
    assert ranked.winner.candidate == plan.rows[1].candidate
    assert ranked.winner.reason == ""
    assert ranked.rows[1].reason.startswith("+100.0%")
    assert all("not compiled" in row.reason for row in ranked.rows[3:])


def test_what_the_compiler_finds_too_large_is_replaced_by_the_next(plan, monkeypatch):
    compiled(monkeypatch, [proved(0.1, fits=False), proved(2.0), proved(None, failure="broken")])
    ranked = prove(plan, 1, lambda line: None)
    assert ranked.winner.seconds == 2.0
    assert "the compiler needs" in ranked.misfits[-1].reason


def test_nothing_is_chosen_if_nothing_compiled_fits(plan, monkeypatch):
    compiled(monkeypatch, [proved(0.1, fits=False), proved(None, failure="not compiled: broken")])
    ranked = prove(plan, 1, lambda line: None)
    assert ranked.winner is None
    assert [row.reason for row in ranked.misfits][-1] == "not compiled: broken"


def test_a_configuration_that_cannot_be_compiled_says_why():
    answer = compile_configuration("nonsense: 1\ncompile:\n  topology: cpu\n", lambda line: None)
    assert not answer.fits
    assert answer.failure.startswith("not compiled: config error: nonsense")
