"""A small plan, of one schedule and policy, for tests of what is shown of plans."""

import dataclasses

from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.best import Plan, make_plan
from maxpipe.plan.search.candidate import Row
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.request import Request, placed


def small_plan(topology: str, **values: object) -> Plan:
    """Plan a model of four layers for a topology, by closed forms."""
    config = replace(Config(), **{"model.num_layers": 4, "eval.every": 0, **values})
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of(topology, 1, config)
    config = placed(config, machine)
    choices: dict[str, list[object]] = {
        "pipeline.schedule": ["lockstep_1f1b"],
        "pipeline.remat_policy": ["full"],
    }
    return make_plan(Request("base", config, config, machine, (16,), choices, 0.1), Facts(config))


def scaled(row: Row, factor: float) -> Row:
    """Return a row whose step takes `factor` times as long by closed forms."""
    seconds = Seconds(*(factor * part for part in row.candidate.seconds))
    return dataclasses.replace(row, candidate=dataclasses.replace(row.candidate, seconds=seconds))
