"""The page of a plan, in parts that the command's own tests do not see."""

import dataclasses

import pytest

from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.plan import make_plan
from maxpipe.planning.search.request import Request
from maxpipe.render.plan_page import bars_svg, page_html
from maxpipe.render.plan_table import table_cells


@pytest.fixture(scope="module")
def plan():
    config = replace(Config(), **{"model.num_layers": 4, "eval.every": 0})
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of("v5p:2x2x1", 1, config)
    choices = {"pipeline.schedule": ["lockstep_1f1b"], "pipeline.remat_policy": ["full"]}
    return make_plan(Request("base", config, config, machine, (16,), choices, 0.1), Facts(config))


@pytest.mark.parametrize("name", ["", "a configuration whose name is far too long"])
def test_labels_that_are_too_long_are_squeezed_into_their_space(plan, name):
    row = dataclasses.replace(plan.rows[0], name=name)
    assert bars_svg(plan, [row]).count(' textLength="292"') == bool(name)


def test_page_names_the_configuration_and_has_the_table_with_every_reason(plan):
    request = dataclasses.replace(plan.request, path="qwen3-0.6b")
    page = page_html(dataclasses.replace(plan, request=request), ["qwen3-0.6b"])
    assert "<title>Plan for qwen3-0.6b on v5p:2x2x1</title>" in page
    rows = table_cells(plan)
    assert len(rows) > 2
    assert page.count("<tr>") == len(rows)
    for row in rows:
        assert f"{row[-1]}</t" in page
