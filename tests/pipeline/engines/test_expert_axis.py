"""Experts on devices of their own where the table of `test_equals_one_device` does not reach."""

import dataclasses
import math

import jax
import pytest
from helpers.engines import make_batch, on_one_device, sequential, tiny, under_test
from helpers.ragged import ragged_all_to_all
from helpers.routing import assert_same_as_one_device

from maxpipe.config.catalog import DISPATCHES
from maxpipe.model.experts import imbalance

ROWS = 16
EXPERTS = (
    "moe.experts=8 moe.per_token=2 moe.mlp_dim=16 moe.balance_loss=0.3 moe.z_loss=0.1 "
    "moe.bias_rate=0.5 "
)
STAGES = "stage=2 num_microbatches=2 num_repeats=2 "
LAYOUTS = {
    "sequential": "engine=sequential",
    "lockstep_1f1b": STAGES + "schedule=lockstep_1f1b",
    "circular": STAGES + "schedule=circular",
}


pytestmark = pytest.mark.slow


def assert_equals_one_device(layout, words, values=None, **options):
    config = tiny(f"{EXPERTS}{LAYOUTS[layout]} {words}", **values or {})
    assert_same_as_one_device(under_test(config, **options).train, on_one_device(config), ROWS)


@pytest.mark.parametrize("fill", [math.nan, 1e30])
@pytest.mark.parametrize("dispatch", ["ring", "all_to_all moe.capacity_factor=1.0"])
def test_idle_slots_may_route_anything(dispatch, fill):
    words = f"expert=2 skip_idle=false moe.dispatch={dispatch}"
    assert_equals_one_device("lockstep_1f1b", words, idle_fill=fill)


def test_whole_weights_are_gathered_where_rules_split_others_over_expert_too():
    rules = [
        ["embed", ["fsdp", "expert"]] if name == "embed" else [name, axes]
        for name, axes in tiny().sharding.logical_axis_rules
    ]
    values = {"sharding.logical_axis_rules": rules}
    assert_equals_one_device("lockstep_1f1b", "num_repeats=1 parallel_layers=2 expert=2", values)


@pytest.mark.parametrize("layout", ["sequential", "lockstep_1f1b", "circular"])
def test_ragged_dispatch_equals_one_device(layout, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    everywhere = dataclasses.replace(DISPATCHES["ragged"], platforms=("cpu",))
    monkeypatch.setitem(DISPATCHES, "ragged", everywhere)
    assert_equals_one_device(layout, "expert=4 moe.dispatch=ragged moe.capacity_factor=1.0")


def test_evaluation_of_rows_that_the_axis_does_not_divide_equals_one_device():
    config = tiny(EXPERTS + LAYOUTS["lockstep_1f1b"] + " expert=4")
    expected = sequential(on_one_device(config), ROWS).evaluate(make_batch(6))
    assert under_test(config).evaluate(make_batch(6)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_for_a_usual_share_or_for_all_equal_one_device(layout, monkeypatch):
    monkeypatch.setattr(imbalance, "_LEAST", 0)
    assert_equals_one_device(layout, "expert=4 fsdp=1 num_layers_per_stage=1")
