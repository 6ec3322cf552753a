"""The scheduled engine's loss and gradients equal the sequential engine's, for all its options."""

import math

import pytest
from helpers.grids import (
    COMMON,
    assert_equals_sequential,
    chunk_sizes,
    config_of,
    default_first,
    every_nth,
)
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
    number, _, place = case["outside"].partition(" ")
    inside, outside = sum(chunk_sizes(case)), int(number or 0)
    values = {
        "pipeline.engine": "scheduled",
        "pipeline.schedule": case["schedule"],
        "pipeline.overlap_slots": case["overlap"],
        "pipeline.skip_idle": "true" if case["skip_idle"] else "false",
        "pipeline.parallel_layers": inside,
        "pipeline.outside_layers": place or "after",
        "model.num_layers": inside + outside,
    }
    fill = math.nan if case["nan_idle"] else 0.0
    assert_equals_sequential(config_of(case, **values), case, idle_fill=fill)


# A few cases of split backwards for every run; the product has the others.
SPLIT = {name: values[0] for name, values in FACTORS.items()} | {
    "schedule": "lockstep_zb",
    "stages": 2,
    "scan": False,
    "remat": "minimal",
    "nan_idle": True,
}
SPLIT_CASES = [
    {
        "repeats": 2,
        "microbatches": 1.5,
        "mesh": "fsdp",
        "tied": True,
        "block": "balanced",
        "uneven": True,
    },
    {
        "layers": 2,
        "microbatches": 1,
        "mesh": "fsdp tensor",
        "gather": "once",
        "delay": True,
        "skip_idle": False,
    },
    {"stages": 4, "microbatches": 4, "packed": False, "remat": "none", "overlap": True},
]


@pytest.mark.parametrize("case", default_first([SPLIT | case for case in SPLIT_CASES], 1))
def test_gradients_of_split_backwards_equal_sequential(case):
    check(case)


# Its gathers of whole weights, its loops and its head have collectives of the same kind, which CPU
# devices would mix up if nothing kept them in order.
MANY_COLLECTIVES = SPLIT | {
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
}


@pytest.mark.slow
def test_gradients_with_many_collectives_at_once_equal_sequential():
    check(MANY_COLLECTIVES)


PAIRWISE = covering_array(FACTORS, is_legal, CONSTRAINED)


@pytest.mark.parametrize("case", default_first(PAIRWISE, 1))
def test_gradients_of_every_pair_of_options_equal_sequential(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", every_nth(sampled_product(BOTH, GRID, is_legal), 61))
def test_gradients_of_the_full_product_equal_sequential(case):
    check(case)


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
