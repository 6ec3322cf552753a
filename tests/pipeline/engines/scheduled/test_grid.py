"""The scheduled engine's loss and gradients equal those of one device, for all its options."""

import math

import pytest
from helpers.engines import assert_equals_one_device
from helpers.grids import COMMON, config_of, every_nth, named
from helpers.pairwise import covering_array, legal_pairs, sampled_product

FACTORS = COMMON | {
    "schedule": ("lockstep_1f1b",),
    # times stages; fractions are fewer microbatches than stages, and numbers that the stages do not
    # divide
    "microbatches": (0.5, 1, 1.5, 2, 4),
    "mesh": (
        "",
        "fsdp",
        "tensor",
        "data fsdp",
        "fsdp tensor",
        "data fsdp tensor",
    ),  # two devices each
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
GRID = (
    "schedule",
    "stages",
    "repeats",
    "layers",
    "microbatches",
    "mesh",
    "delay",
    "overlap",
    "skip_idle",
)
# All that `is_legal` looks at.
CONSTRAINED = ("stages", "repeats", "microbatches", "mesh", "uneven", "remat", "remat_of")


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        and case["stages"] * case["microbatches"] % 1 == 0
        and case["stages"] * case["repeats"] > case["uneven"]
        and not (case["remat"] == "none" and "layers" in case["remat_of"])
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


# The first of all values where a case has no other.
SIMPLE = {name: values[0] for name, values in FACTORS.items()} | {"nan_idle": True}
SPLIT = SIMPLE | {"schedule": "lockstep_zb", "stages": 2, "scan": False, "remat": "minimal"}
CASES = [
    SPLIT | {"repeats": 2, "microbatches": 1.5, "mesh": "fsdp", "tied": True, "block": "balanced"},
    SIMPLE
    | {
        "stages": 4,
        "repeats": 2,
        "microbatches": 4,
        "packed": False,
        "uneven": True,
        "tiled": True,
        "remat": "minimal",
        "remat_of": "iterations layers",
        "overlap": True,
        "gather": "once",
    },
]
SLOW_CASES = [
    SPLIT
    | {
        "layers": 2,
        "microbatches": 1,
        "mesh": "fsdp tensor",
        "gather": "once",
        "delay": True,
        "skip_idle": False,
    },
    SPLIT | {"stages": 4, "microbatches": 4, "packed": False, "remat": "none", "overlap": True},
    # Its gathers of whole weights, its loops and its head have collectives of the same kind, which
    # CPU devices would mix up if nothing kept them in order.
    SPLIT
    | {
        "stages": 4,
        "repeats": 2,
        "microbatches": 4,
        "packed": False,
        "dropout": 0.2,
        "uneven": True,
        "tiled": True,
        "remat": "none",
        "remat_of": "",
        "skip_idle": False,
        "gather": "once",
        "outside": "1 after",
    },
]


@pytest.mark.parametrize("case", named(CASES))
def test_gradients_equal_those_of_one_device(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", named(SLOW_CASES))
def test_gradients_of_further_cases_equal_those_of_one_device(case):
    check(case)


def pairwise():
    yield from covering_array(FACTORS, is_legal, CONSTRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("case", named(pairwise()))
def test_gradients_of_every_pair_of_options_equal_those_of_one_device(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", every_nth(sampled_product(BOTH, GRID, is_legal), 61))
def test_gradients_of_the_full_product_equal_those_of_one_device(case):
    check(case)


@pytest.mark.slow
def test_pairs_that_are_left_out_are_impossible():
    """Only the devices or the options themselves exclude them."""
    everything = legal_pairs(FACTORS, lambda case: True, CONSTRAINED)
    assert everything - legal_pairs(FACTORS, is_legal, CONSTRAINED) == {
        ("stages", 4, "mesh", "data fsdp"),
        ("stages", 4, "mesh", "fsdp tensor"),
        ("stages", 2, "mesh", "data fsdp tensor"),
        ("stages", 4, "mesh", "data fsdp tensor"),
        ("stages", 1, "microbatches", 0.5),
        ("stages", 1, "microbatches", 1.5),
        ("microbatches", 0.5, "mesh", "data fsdp tensor"),
        ("microbatches", 1.5, "mesh", "data fsdp tensor"),
        ("remat", "none", "remat_of", "layers"),
        ("remat", "none", "remat_of", "iterations layers"),
    }
