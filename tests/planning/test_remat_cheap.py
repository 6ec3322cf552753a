"""Whether cheap values are computed layer by layer on auto, and what is said about it."""

import pytest
from helpers.fsdp_stages import config_of

from maxpipe.devices.chips import GIB
from maxpipe.planning.estimate import estimate
from maxpipe.planning.remat_cheap import KEY, with_remat_cheap

SEVERAL = {"model.num_layers": 8}  # four on each of two stages
CIRCULAR = {
    "pipeline.engine": "circular",
    "pipeline.schedule": "circular",
    "pipeline.num_microbatches": 4,
}
V5P = 95 * GIB


def decided(memory, **values):
    """Return (value, notes)."""
    notes = []
    config = with_remat_cheap(config_of(**values), memory, notes.append)
    return config.pipeline.remat_cheap, notes


@pytest.mark.parametrize("values", [{}, CIRCULAR], ids=["lockstep", "circular"])
def test_auto_holds_cheap_values_where_half_of_a_tpu_is_idle(values):
    value, (note,) = decided(V5P, **SEVERAL | values)
    assert value == "false"
    assert note.startswith("pipeline.remat_cheap=false: with at most 0.00 GiB of cheap values")
    assert note.endswith("at most 50% of a device's 95 GiB")


@pytest.mark.parametrize("values", [{}, CIRCULAR], ids=["lockstep", "circular"])
def test_auto_computes_cheap_values_again_where_a_step_takes_over_half_of_a_tpu(values):
    memory = 2 * estimate(config_of(**SEVERAL | values), V5P).total
    value, (note,) = decided(memory, **SEVERAL | values)
    assert value == "true"
    assert " a step takes over 50% " in note


@pytest.mark.parametrize(
    "values",
    [
        {"model.num_layers": 2},
        SEVERAL | {"pipeline.remat_layers": True},
        SEVERAL | {"pipeline.remat_iterations": False},
        SEVERAL | {"pipeline.remat_policy": "none"},
        SEVERAL | {"pipeline.engine": "mpmd", "pipeline.schedule": "1f1b"},
    ],
    ids=["one layer", "by layer", "no iterations", "saves all", "mpmd"],
)
def test_auto_says_nothing_where_there_is_no_choice(values):
    assert decided(V5P, **values) == ("true", [])


def test_auto_computes_cheap_values_again_on_devices_other_than_tpus():
    assert decided(None, **SEVERAL) == ("true", [])


@pytest.mark.parametrize("value", ["true", "false"])
def test_value_that_is_set_is_taken(value):
    assert decided(V5P, **SEVERAL | {KEY: value}) == (value, [])
    assert decided(None, **SEVERAL | {KEY: value}) == (value, [])
