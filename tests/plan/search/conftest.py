"""A small request and the facts of its model, for searches that take a moment."""

import pytest

from maxpipe.config import Config, replace
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.request import Request

CHOICES = {"pipeline.schedule": ["lockstep_1f1b"], "pipeline.remat_policy": ["full"]}


@pytest.fixture(scope="module")
def request_and_facts():
    config = replace(Config(), **{"model.num_layers": 4, "model.head_dim": 64, "eval.every": 0})
    machine = machine_of("v5e:2x2", 1, config)
    return Request("base", config, config, machine, (64,), CHOICES, 0.0), Facts(config)
