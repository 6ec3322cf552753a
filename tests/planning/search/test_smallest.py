"""The smallest slice that trains a model."""

import dataclasses

import pytest

from maxpipe.config import Config, ConfigError, Problem, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.planning.search import plan as plans
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.request import Request
from maxpipe.planning.search.smallest import smallest_plans

CHOICES = {"pipeline.schedule": ["lockstep_1f1b"], "pipeline.remat_policy": ["full"]}


@pytest.fixture(scope="module")
def request_and_facts():
    config = replace(Config(), **{"model.num_layers": 4, "eval.every": 0})
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of("v5e:2x2", 1, config)
    return Request("base", config, config, machine, (64,), CHOICES, 0.0), Facts(config)


def test_smallest_goes_on_where_what_fits_a_slice_does_not_pass_the_checks(
    request_and_facts, monkeypatch
):
    request, facts = request_and_facts
    request = dataclasses.replace(request, smallest=("v5e:2x2", "v5e:2x4"))

    def resolve(config, devices, slices):
        if devices <= few:
            raise ConfigError(Problem("data", "is refused"))

    monkeypatch.setattr(plans, "resolve", resolve)
    few, lines = 4, []
    (plan,) = smallest_plans(request, facts, lines.append)
    assert plan.request.machine.topology == "v5e:2x4"
    assert lines == ["trying      v5e:2x2", "trying      v5e:2x4"]
    few = 8
    with pytest.raises(ConfigError, match="data: is refused"):
        smallest_plans(request, facts, lines.append)
