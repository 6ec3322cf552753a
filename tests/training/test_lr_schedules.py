"""Test the learning-rate schedules against their closed forms."""

import dataclasses

import jax.numpy as jnp
import pytest

from maxpipe.config import OptimizerConfig
from maxpipe.config.catalog import LR_SCHEDULES
from maxpipe.training.update import Optimizer

# Ten steps of warm-up, then a hundred steps of decay from 2 to 0.2.
CONFIG = OptimizerConfig(learning_rate=2.0, warmup_steps=10, decay_steps=110, final_fraction=0.1)


def rate(name, step, **values):
    optimizer = Optimizer(dataclasses.replace(CONFIG, schedule=name, **values), {})
    return float(optimizer.learning_rate(jnp.int32(step)))


def test_lr_schedule_in_warm_up_rises_linearly_from_the_first_update():
    for name in LR_SCHEDULES:
        rates = [rate(name, step) for step in range(10)]
        assert rates == pytest.approx([0.2 * (i + 1) for i in range(10)]), name


COSINE = {35: 0.2 + 1.8 * 0.853553, 85: 0.2 + 1.8 * 0.146447}
AFTER_WARM_UP = {
    "constant": {10: 2, 60: 2, 110: 2, 500: 2},
    "cosine": {10: 2, **COSINE, 60: 1.1, 110: 0.2, 500: 0.2},
    "inverse_sqrt": {10: 2, 40: 1, 90: 2 / 3, 110: 2 / 11**0.5, 500: 2 / 11**0.5},
    "linear": {10: 2, 35: 1.55, 60: 1.1, 85: 0.65, 110: 0.2, 500: 0.2},
    "wsd": {10: 2, 60: 2, 90: 2, 95: 1.55, 100: 1.1, 105: 0.65, 110: 0.2, 500: 0.2},
}


def test_lr_schedule_after_warm_up_has_the_closed_form_values():
    assert [*LR_SCHEDULES] == [*AFTER_WARM_UP]
    for name, values in AFTER_WARM_UP.items():
        assert {step: rate(name, step) for step in values} == pytest.approx(values, rel=1e-5), name


def test_lr_schedule_with_fractions_or_without_warm_up():
    for name, step, values, expected in [
        ("wsd", 60, {"stable_fraction": 0.5}, 2),
        ("wsd", 85, {"stable_fraction": 0.5, "final_fraction": 0.0}, 1),
        # Only a stable phase, then none.
        ("wsd", 109, {"stable_fraction": 1.0}, 2),
        ("wsd", 60, {"stable_fraction": 0.0}, 1.1),
        ("inverse_sqrt", 90, {"final_fraction": 0.5}, 1),
        ("inverse_sqrt", 3, {"warmup_steps": 0}, 1),
        ("linear", 0, {"warmup_steps": 0}, 2),
        ("linear", 110, {"warmup_steps": 110}, 2),
        ("linear", 111, {"warmup_steps": 110}, 0.2),
    ]:
        assert rate(name, step, **values) == pytest.approx(expected), (name, step)
