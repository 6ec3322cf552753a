"""A search becomes rows: the best of each sort that is sound, and faster ones that do not fit."""

import dataclasses

import pytest

from maxpipe.config import Config, ConfigError, Problem, replace
from maxpipe.config.sections import MESH_AXES
from maxpipe.devices.chips import GIB
from maxpipe.plan.search import best as module
from maxpipe.plan.search.best import MISFITS, WORTH, make_plan
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.request import Request


def requested(topology="v5p:2x2x1", batch=16, margin=0.1, capacity=None, **choices):
    config = replace(Config(), **{"model.num_layers": 4, "model.head_dim": 64, "eval.every": 0})
    machine = machine_of(topology, 1, config)
    if capacity is not None:
        machine = dataclasses.replace(machine, capacity=capacity)
    tried = {f"pipeline.{key}": values for key, values in choices.items()}
    return Request("base", config, config, machine, (batch,), tried, margin)


def planned(request):
    return make_plan(request, Facts(request.config))


@pytest.fixture(scope="module")
def free():
    return planned(requested("v5p:2x2x2", batch=64))


@pytest.fixture
def refused(monkeypatch):
    """Refuse configurations by a test of them; a list of those that were checked."""
    checked = []

    def refuse(test):
        def resolve(config, devices, slices):
            checked.append(config)
            if test(config):
                raise ConfigError(Problem("mesh.ici.fsdp", "is refused"))
            return config

        monkeypatch.setattr(module, "resolve", resolve)
        return checked

    return refuse


def test_every_mesh_that_fits_is_a_row_however_near_the_candidates_of_the_best_ones_are(free):
    sorts = {candidate.sort for candidate in free.outcome.fitting}
    assert len(free.rows) == min(len(sorts), module.ROWS) > 50
    assert len({row.candidate.sort for row in free.rows}) == len(free.rows)


def test_rows_are_those_that_pass_the_checks_where_the_best_hundred_fail(free, refused):
    request = requested("v5p:2x2x2", batch=64)
    best = {candidate.grid for candidate in free.outcome.fitting[:100]}
    checked = refused(
        lambda config: tuple(config.mesh.size(axis) for axis in MESH_AXES) in {g.ici for g in best}
    )
    plan = planned(request)
    assert len(checked) > 100
    assert plan.rows
    assert not {row.candidate.grid for row in plan.rows} & best
    assert plan.outcome.fallen["mesh.ici.fsdp: is refused"] == len(checked) - len(plan.rows)


def test_candidates_that_fit_and_all_fail_the_checks_are_an_error_and_not_too_large(refused):
    refused(lambda config: True)
    with pytest.raises(ConfigError, match=r"mesh.ici.fsdp: is refused; so none of the \d+ fastest"):
        planned(requested())


def test_misfits_are_the_faster_ones_that_need_least_memory(free):
    sizes = sorted(candidate.memory for candidate in free.outcome.fitting)
    limit = sizes[len(sizes) // 8]  # most does not fit
    plan = planned(requested("v5p:2x2x2", batch=64, capacity=limit, margin=0.0))
    best = plan.rows[0]
    faster = [
        candidate
        for candidate in free.outcome.fitting
        if candidate.memory > limit
        and candidate.per_sequence < (1 - WORTH) * best.candidate.per_sequence
    ]
    assert len(plan.misfits) == MISFITS
    least = min(candidate.memory for candidate in faster)
    assert limit < plan.misfits[0].memory <= least
    assert plan.misfits[0].memory <= plan.misfits[1].memory
    for row in plan.misfits:
        above = f"{(row.memory - limit) / GIB:.3g} GiB above the usable {limit / GIB:.3g}"
        assert row.reason.endswith(f"% faster, {above}")
