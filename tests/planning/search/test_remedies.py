"""What would fit where nothing does: each tried by a search, in a time, and said to be tried."""

import dataclasses

import pytest

from maxpipe.config import ConfigError, Problem
from maxpipe.planning.search import plan as plans
from maxpipe.planning.search import remedies as module
from maxpipe.planning.search.plan import make_plan
from maxpipe.planning.search.remedies import refusing_margin, remedies
from maxpipe.planning.search.rows import Proof


def on_capacity(request, share, facts):
    """Return the request on devices with so much of what the least candidate needs."""
    least = make_plan(request, facts).outcome.least
    machine = request.machine._replace(capacity=share * least.memory)
    return dataclasses.replace(request, machine=machine)


def test_remedies_say_what_is_tried(request_and_facts):
    request, facts = request_and_facts
    lines = []
    plan = make_plan(on_capacity(request, 0.9, facts), facts)
    found = remedies(plan, facts, lines.append)
    assert plan.winner is None
    assert lines[0] == "trying      data.global_batch_size=32"
    assert lines[-1].startswith("trying      --topology v5e:")
    assert found[0].startswith("fewer tokens: data.global_batch_size=")
    assert found[1].startswith("more chips: --topology v5e:")


def test_remedies_end_when_their_time_is_over(request_and_facts, monkeypatch):
    request, facts = request_and_facts
    plan = make_plan(on_capacity(request, 0.9, facts), facts)
    ticks = iter(range(10**6))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(module, "SECONDS", 3.0)
    lines = []
    assert remedies(plan, facts, lines.append) == []
    assert lines == ["trying      data.global_batch_size=32", "            left off after 3 s"]


def test_remedies_pass_the_configurations_checks(request_and_facts, monkeypatch):
    request, facts = request_and_facts
    plan = make_plan(on_capacity(request, 0.96, facts), facts)
    fewer, more = remedies(plan, facts, lambda line: None)
    assert fewer.startswith("fewer tokens: data.global_batch_size=2,")
    assert more.startswith("more chips: ")

    def resolve(config, devices, slices):
        if config.data.global_batch_size == 2 or devices > 4:
            raise ConfigError(Problem("data", "is refused"))

    monkeypatch.setattr(plans, "resolve", resolve)
    (fewer,) = remedies(plan, facts, lambda line: None)
    assert fewer.startswith("fewer tokens: data.global_batch_size=1,")


@pytest.mark.parametrize(
    ("share", "margin"), [(0.97, 0.05), (0.95, 0.1), (0.6, 0.45), (0.04, None)]
)
def test_refusing_margin_is_the_next_by_which_closed_forms_refuse_what_the_compiler_did(
    request_and_facts, share, margin
):
    request, facts = request_and_facts
    plan = make_plan(request, facts)
    refusal = Proof(1e12, None, False, "", 1.0)
    least, more = sorted(plan.rows, key=lambda row: row.memory)[:2]
    machine = request.machine._replace(capacity=least.memory / share)
    misfits = [dataclasses.replace(more, proof=refusal), dataclasses.replace(least, proof=refusal)]
    request = dataclasses.replace(request, machine=machine)
    compiled = dataclasses.replace(plan, request=request, misfits=misfits)
    assert refusing_margin(compiled) == margin
    crashed = dataclasses.replace(least, proof=Proof(None, None, False, "killed", 1.0))
    for others in ([least], [crashed]):
        assert refusing_margin(dataclasses.replace(compiled, misfits=others)) is None
