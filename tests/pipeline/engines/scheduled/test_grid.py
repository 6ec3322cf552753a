"""The scheduled engine's loss and gradients equal those of one device, for all its options."""

import math

import pytest
from helpers.engines import assert_equals_one_device
from helpers.grids import COMMON, config_of, covering_array, every_nth, named, sampled_product

# Axes with two devices each.
ONE_AXIS = ("", "fsdp", "tensor", "context")
SEVERAL_AXES = ("data fsdp", "fsdp tensor", "fsdp context", "data fsdp tensor")
FACTORS = COMMON | {
    "schedule": ("lockstep_1f1b",),
    # times stages; fractions are fewer microbatches than stages, and numbers that the stages do not
    # divide
    "microbatches": (0.5, 1, 1.5, 2, 4),
    "mesh": (*ONE_AXIS, *SEVERAL_AXES),
    "remat": ("full", "minimal", "none"),
    "remat_of": ("iterations", "layers", "iterations layers", ""),
    "overlap": (False, True),
    "skip_idle": (True, False),
    "gather": ("per_iteration", "once"),
    "outside": ("", "1 after", "3 after", "1 before", "3 before"),
    "nan_idle": (False, True),
}
BOTH = FACTORS | {"schedule": ("lockstep_1f1b", "lockstep_zb")}
# The full product is taken of these; in it the others vary.
GRID = ("schedule", "stages", "repeats", "layers", "microbatches", "mesh", "delay", "overlap")
GRID += ("skip_idle",)
# All that `is_legal` looks at.
CONSTRAINED = ("stages", "repeats", "microbatches", "mesh", "uneven", "remat", "remat_of", "block")


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        and case["stages"] * case["microbatches"] % 1 == 0
        and case["stages"] * case["repeats"] > case["uneven"]
        and not (case["remat"] == "none" and "layers" in case["remat_of"])
        # The block's loss is not one of a sequence in parts.
        and not (case["block"] == "balanced" and "context" in case["mesh"])
        and not (
            case["schedule"] == "lockstep_zb"
            and (case["scan"] or (case["remat"] == "full" and case["remat_of"]))
        )
    )


def check(case):
    values = {
        "pipeline.engine": "scheduled",
        "pipeline.schedule": case["schedule"],
        "pipeline.overlap_slots": case["overlap"],
        "pipeline.skip_idle": "true" if case["skip_idle"] else "false",
    }
    fill = math.nan if case["nan_idle"] else 0.0
    config = config_of(case, **values)
    assert_equals_one_device(config, packed=case["packed"], idle_fill=fill)


@pytest.mark.slow
@pytest.mark.parametrize("case", named(covering_array(FACTORS, is_legal, CONSTRAINED)))
def test_gradients_of_every_pair_of_options_equal_those_of_one_device(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", every_nth(sampled_product(BOTH, GRID, is_legal), 61))
def test_gradients_of_the_full_product_equal_those_of_one_device(case):
    check(case)
