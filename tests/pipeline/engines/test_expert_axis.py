"""Experts on devices of their own: losses and gradients of one device, on every engine."""

import math
from dataclasses import replace
from itertools import product

import jax
import pytest
from helpers.engines import LATENT, EngineUnderTest, make_batch, reference, tiny
from helpers.mpmd_under_test import MpmdUnderTest
from helpers.ragged import ragged_all_to_all
from helpers.routing import assert_same_as_one_device

from maxpipe.config.catalog import DISPATCHES

ROWS = 16
EXPERTS = {
    "model.moe.experts": 8,
    "model.moe.per_token": 2,
    "model.moe.mlp_dim": 16,
    "model.moe.balance_loss": 0.3,
    "model.moe.z_loss": 0.1,
    "model.moe.bias_rate": 0.5,
}
STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 2}
LAYOUTS = {
    "sequential": {"pipeline.engine": "sequential"},
    "lockstep_1f1b": {
        **STAGES,
        "pipeline.schedule": "lockstep_1f1b",
        "pipeline.num_repeats": 2,
    },
    "zb_v": {
        **STAGES,
        "pipeline.schedule": "zb_v",
        "pipeline.num_repeats": 2,
        "pipeline.remat_policy": "minimal",
    },
    "circular": {**STAGES, "pipeline.schedule": "circular", "pipeline.num_repeats": 2},
    "mpmd": {**STAGES, "pipeline.schedule": "1f1b"},
}
DEEPSEEK = {
    **LATENT,
    "model.first_dense_layers": 1,
    "pipeline.parallel_layers": 2,
    "model.moe.shared_experts": 1,
    "pipeline.outside_layers": "before",
}
CAPACITY = {"model.moe.capacity_factor": 1.0}
# With the other mesh axes, and with what else could get in the way.
MIXED = {
    "lockstep_1f1b tensor": (
        "lockstep_1f1b",
        "all_to_all",
        {"mesh.ici.tensor": 2, "model.mlp_bias": True},
    ),
    "circular fsdp": ("circular", "ring", {"mesh.ici.fsdp": 2}),
    "mpmd once": ("mpmd", "ring", {"mesh.ici.fsdp": 2, "pipeline.fsdp_gather": "once"}),
    "sequential context": (
        "sequential",
        "all_to_all",
        {"mesh.ici.context": 2, "mesh.ici.data": 2},
    ),
    # The rest of the weights lies over expert, too, and the whole weights are gathered.
    "lockstep_1f1b embed": (
        "lockstep_1f1b",
        "ring",
        {
            "sharding.logical_axis_rules": [
                ["embed", ["fsdp", "expert"]] if name == "embed" else [name, axes]
                for name, axes in tiny().sharding.logical_axis_rules
            ],
            "pipeline.parallel_layers": 2,
            "pipeline.num_repeats": 1,
        },
    ),
    "circular once": (
        "circular",
        "all_to_all",
        {"pipeline.fsdp_gather": "once", "mesh.ici.fsdp": 2, "model.moe.shared_experts": 1},
    ),
    # What autodiff would sum in every iteration, without split weights.
    "circular whole": ("circular", "ring", {"pipeline.fsdp_gather": "once", "mesh.ici.data": 2}),
    "lockstep_1f1b once": (
        "lockstep_1f1b",
        "ring",
        {"pipeline.fsdp_gather": "once", "mesh.ici.fsdp": 2, "pipeline.skip_idle": "false"},
    ),
    "zb_v context": ("zb_v", "all_to_all", {"mesh.ici.context": 2}),
    "lockstep_1f1b capacity": ("lockstep_1f1b", "all_to_all", CAPACITY | {"mesh.ici.fsdp": 2}),
    "circular capacity": ("circular", "ring", CAPACITY | {"mesh.ici.tensor": 2}),
    # DeepSeek-V3's layers: latent attention, a shared expert, and dense layers before the pipeline.
    "lockstep_1f1b latent": (
        "lockstep_1f1b",
        "ring",
        DEEPSEEK | {"pipeline.num_repeats": 1, "mesh.ici.fsdp": 2},
    ),
    "circular latent": ("circular", "all_to_all", DEEPSEEK | {"pipeline.num_repeats": 1}),
    "mpmd latent": (
        "mpmd",
        "ring",
        {
            **DEEPSEEK,
            "model.num_layers": 5,
            "pipeline.parallel_layers": -1,
            "pipeline.outside_layers": "after",
        },
    ),
}
# The others differ from one of these in less.
DEFAULT = ("lockstep_1f1b tensor", "circular fsdp")
MARKED = [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.slow]) for n in MIXED]


def assert_equals_one_device(layout, dispatch, devices, values, **options):
    config = tiny(
        **EXPERTS
        | {"model.moe.dispatch": dispatch, "mesh.ici.expert": devices}
        | LAYOUTS[layout]
        | values
    )
    subject = MpmdUnderTest if config.pipeline.engine == "mpmd" else EngineUnderTest
    model = replace(config.model, moe=replace(config.model.moe, dispatch="auto"))
    assert set(reference(model, ROWS).auxiliary) == {"balance_loss", "z_loss"}
    assert_same_as_one_device(subject(config, **options).train, model, ROWS)


@pytest.mark.parametrize("name", MARKED)
def test_losses_and_gradients_equal_those_of_one_device(name):
    layout, dispatch, values = MIXED[name]
    assert_equals_one_device(layout, dispatch, 2, values)


@pytest.mark.parametrize(
    ("dispatch", "values", "fill"),
    [
        ("ring", {}, math.nan),
        pytest.param("ring", {}, 1e30, marks=pytest.mark.slow),
        pytest.param("all_to_all", CAPACITY, math.nan, marks=pytest.mark.slow),
        pytest.param("all_to_all", CAPACITY, 1e30, marks=pytest.mark.slow),
    ],
)
def test_idle_slots_may_route_anything(dispatch, values, fill):
    values = values | {"pipeline.skip_idle": "false"}
    assert_equals_one_device("lockstep_1f1b", dispatch, 2, values, idle_fill=fill)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sequential", "lockstep_1f1b", "circular"])
def test_ragged_dispatch_equals_one_device(layout, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    everywhere = replace(DISPATCHES["ragged"], platforms=("cpu",))
    monkeypatch.setitem(DISPATCHES, "ragged", everywhere)
    assert_equals_one_device(layout, "ragged", 4, CAPACITY)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("layout", "dispatch", "devices"), product(LAYOUTS, ("ring", "all_to_all"), (2, 4))
)
def test_every_engine_and_dispatch_equals_one_device(layout, dispatch, devices):
    assert_equals_one_device(layout, dispatch, devices, {})


@pytest.mark.slow
def test_evaluation_of_rows_that_the_axis_does_not_divide_equals_one_device():
    values = EXPERTS | LAYOUTS["lockstep_1f1b"]
    batch = make_batch(6)
    actual = EngineUnderTest(tiny(**values | {"mesh.ici.expert": 4})).evaluate(batch)
    expected = EngineUnderTest(tiny(**EXPERTS | LAYOUTS["sequential"])).evaluate(batch)
    assert actual == pytest.approx(expected, rel=1e-5)
