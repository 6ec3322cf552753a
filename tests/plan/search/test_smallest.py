"""The smallest slice that trains a model."""

import dataclasses

import pytest

from maxpipe.config import ConfigError, Problem
from maxpipe.plan.search import best as plans
from maxpipe.plan.search.best import smallest_plans


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
