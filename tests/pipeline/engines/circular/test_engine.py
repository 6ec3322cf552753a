"""The circular engine computes the loss and every gradient of the sequential one."""

import math
from itertools import cycle

import jax
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, tiny
from helpers.grids import (
    COMMON,
    assert_equals_sequential,
    chunk_sizes,
    config_of,
    default_first,
    every_nth,
)
from helpers.pairwise import covering_array, legal_pairs, sampled_product

from maxpipe.config import ConfigError
from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.sections.parallelism import DEFAULT_RULES

FACTORS = COMMON | {
    "microbatches": (1, 2, 3, 4),
    "mesh": ("", "data", "fsdp", "tensor", "data fsdp tensor"),
    "gather": ("per_iteration", "per_repeat", "once"),
    "remat": ("none", "full", "minimal", "minimal_offloaded", "custom"),
    "remat_of": ("iterations", "layers", "iterations layers", ""),
    "outside": ("", "1 after", "3 after", "1 before", "3 before"),
    "unroll_repeats": (False, True),
    "nan_bubbles": (False, True),
}
# All that `is_legal` looks at.
CONSTRAINED = (
    "stages",
    "repeats",
    "layers",
    "microbatches",
    "mesh",
    "delay",
    "uneven",
    "gather",
    "remat",
    "remat_of",
    "unroll_repeats",
)
# Policies that differ in nothing but the names of tensors; they take turns.
ALIKE = {
    "minimal": ("minimal", "save_qkv_proj", "save_out_proj", "save_dot_except_mlp"),
    "minimal_offloaded": ("minimal_offloaded", "qkv_proj_offloaded"),
}
CUSTOM = {"pipeline.remat_tensors.query_proj": "device", "pipeline.remat_tensors.mlp_up": "offload"}


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        and case["microbatches"]
        > case["delay"]  # delayed forwarding needs two microbatches a stage
        and case["stages"] * case["repeats"] > case["uneven"]
        and not (case["remat"] == "none" and "layers" in case["remat_of"])
        and not (case["unroll_repeats"] and case["gather"] == "per_iteration")
        and not (case["unroll_repeats"] and case["repeats"] * case["layers"] > 2)  # compiles long
    )


def check(case):
    number, _, place = case["outside"].partition(" ")
    inside, outside = sum(chunk_sizes(case)), int(number or 0)
    values = {
        "pipeline.engine": "circular",
        "pipeline.parallel_layers": inside,
        "pipeline.outside_layers": place or "after",
        "pipeline.scan_repeats": not case["unroll_repeats"],
        "model.num_layers": inside + outside,
    } | (CUSTOM if case["remat"] == "custom" else {})
    fill = math.nan if case["nan_bubbles"] else None
    assert_equals_sequential(config_of(case, **values), case, bubble_fill=fill)


def pairwise():
    turns = {remat: cycle(policies) for remat, policies in ALIKE.items()}
    for case in covering_array(FACTORS, is_legal, CONSTRAINED):
        yield case | ({"remat": next(turns[case["remat"]])} if case["remat"] in turns else {})


PAIRWISE = list(pairwise())


def full_product():
    """The product of some factors, in which the others vary."""
    yield from sampled_product(
        FACTORS, ("stages", "repeats", "layers", "microbatches", "delay"), is_legal
    )
    factors = FACTORS | {"stages": (2, 4), "repeats": (2, 4), "remat": tuple(REMAT_POLICIES)}
    yield from sampled_product(
        factors, ("stages", "repeats", "microbatches", "delay", "gather", "remat"), is_legal
    )


@pytest.mark.parametrize("case", default_first(PAIRWISE, 2))
def test_circular_equals_sequential(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", every_nth(full_product(), 17))
def test_circular_equals_sequential_in_the_full_product(case):
    check(case)


def test_pairwise_cases_run_every_policy():
    assert {case["remat"] for case in PAIRWISE} == set(REMAT_POLICIES)


def test_pairwise_cases_leave_out_few_pairs_of_options():
    """Only what the devices, the options themselves or the time to compile exclude stays out."""
    everything = legal_pairs(FACTORS, lambda case: True, CONSTRAINED)
    assert everything - legal_pairs(FACTORS, is_legal, CONSTRAINED) == {
        ("stages", 2, "mesh", "data fsdp tensor"),
        ("stages", 4, "mesh", "data fsdp tensor"),
        ("delay", True, "microbatches", 1),
        ("remat", "none", "remat_of", "layers"),
        ("remat", "none", "remat_of", "iterations layers"),
        ("gather", "per_iteration", "unroll_repeats", True),
        ("repeats", 4, "unroll_repeats", True),
    }


def small(**values):
    """Two stages of two repeats with two-way FSDP, 24 rows in six microbatches."""
    return tiny(
        **{
            "pipeline.engine": "circular",
            "pipeline.num_repeats": 2,
            "pipeline.num_microbatches": 6,
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
            "data.global_batch_size": 24,
        }
        | values
    )


@pytest.mark.parametrize("gather", ["per_iteration", "per_repeat", "once"])
def test_rules_that_give_two_devices_the_same_rows_are_refused_where_weights_are_kept(gather):
    """Gradients of gathered weights are summed over all devices, so each needs rows of its own."""
    rules = [["activation_batch", ["data"]], *DEFAULT_RULES[1:]]
    assert DEFAULT_RULES[0][0] == "activation_batch"
    config = small(**{"pipeline.fsdp_gather": gather, "sharding.logical_axis_rules": rules})
    if gather == "per_iteration":
        EngineUnderTest(config)
        return
    with pytest.raises(ConfigError, match=f"fsdp_gather={gather} needs rows over all of data, "):
        EngineUnderTest(config)


@pytest.mark.parametrize("gather", ["per_iteration", "per_repeat", "once"])
def test_rules_that_divide_layers_among_devices_with_rows_are_refused_where_weights_are_kept(
    gather,
):
    changes = {"layers_per_stage": ["fsdp"], "embed": []}
    rules = [[name, changes.get(name, axes)] for name, axes in DEFAULT_RULES]
    values = {"model.num_layers": 8, "sharding.logical_axis_rules": rules}
    config = small(**values, **{"pipeline.fsdp_gather": gather})
    if gather == "per_iteration":
        EngineUnderTest(config)
        return
    with pytest.raises(ConfigError, match=r"layers_per_stage over no part of fsdp; use \["):
        EngineUnderTest(config)


def sequential_like(config):
    return tiny(
        **{
            "pipeline.engine": "sequential",
            "data.global_batch_size": config.data.global_batch_size,
            "model.num_layers": config.model.num_layers,
            "model.dtype": config.model.dtype,
        }
    )


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, 24),
        ({}, 10),
        ({"pipeline.delay_activation_forwarding": True}, 8),
        pytest.param(
            {
                "pipeline.fsdp_gather": "per_repeat",
                "pipeline.parallel_layers": 4,
                "model.num_layers": 5,
            },
            72,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "pipeline.fsdp_gather": "once",
                "pipeline.layers_per_stage": [1, 3, 1, 2],
                "model.num_layers": 7,
            },
            10,
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "as_trained",
        "padded",
        "smaller_delay",
        "larger_outside_per_repeat",
        "padded_uneven_once",
    ],
)
def test_evaluate_takes_any_batch_size(values, rows):
    """As large as the training batch, smaller, larger, and not divisible by the microbatches."""
    config, batch = small(**values), make_batch(rows, seed=1)
    expected = EngineUnderTest(sequential_like(config)).evaluate(batch)
    actual = EngineUnderTest(config, bubble_fill=math.nan).evaluate(batch)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_circular_in_bfloat16_stays_close_to_sequential():
    """Stages, microbatches and FSDP may round differently, no more than bfloat16 itself does."""
    config, batch = small(**{"model.dtype": "bfloat16"}), make_batch(24)
    actual = EngineUnderTest(config).train(batch)
    expected = EngineUnderTest(sequential_like(config)).train(batch)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(actual.gradients))
    assert_same(actual, expected, tolerance=3e-2)


def test_loss_with_a_microbatch_without_weights_is_divided_by_all_weights():
    """The loss is divided once, by the weights of the full batch: no mean of microbatch means."""
    batch = make_batch(24)
    batch["weights"][1::6] = 0
    config = small()
    expected = EngineUnderTest(sequential_like(config)).train(batch)
    assert_same(EngineUnderTest(config).train(batch), expected)
