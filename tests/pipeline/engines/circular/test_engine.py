"""The circular engine computes the loss and every gradient of one device."""

import math
from itertools import cycle

import pytest
from helpers.engines import EngineUnderTest, assert_equals_one_device, tiny
from helpers.grids import COMMON, config_of, covering_array, every_nth, named, sampled_product

from maxpipe.config import ConfigError
from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.sections.parallelism import DEFAULT_RULES

FACTORS = COMMON | {
    "microbatches": (1, 2, 3, 4),
    "mesh": ("", "data", "fsdp", "tensor", "context", "data fsdp tensor", "fsdp context"),
    "gather": ("per_iteration", "per_repeat", "once"),
    "remat": ("none", "full", "minimal", "minimal_offloaded", "custom"),
    "remat_of": ("iterations", "layers", "iterations layers", ""),
    "outside": ("", "1 after", "3 after", "1 before", "3 before"),
    "unroll_repeats": (False, True),
    "nan_bubbles": (False, True),
}
# All that `is_legal` looks at.
CONSTRAINED = ("stages", "repeats", "layers", "microbatches", "mesh", "delay", "uneven", "gather")
CONSTRAINED += ("remat", "remat_of", "unroll_repeats", "block")
# Policies that differ in nothing but the names of tensors; they take turns.
ALIKE = {
    "minimal": ("minimal", "save_qkv_proj", "save_out_proj", "save_dot_except_mlp"),
    "minimal_offloaded": ("minimal_offloaded", "qkv_proj_offloaded"),
}
CUSTOM = {"pipeline.remat_tensors.query_proj": "device", "pipeline.remat_tensors.mlp_up": "offload"}


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        # Delayed forwarding needs two microbatches a stage.
        and case["microbatches"] > case["delay"]
        and case["stages"] * case["repeats"] > case["uneven"]
        and not (case["remat"] == "none" and "layers" in case["remat_of"])
        # The block's loss is not one of a sequence in parts.
        and not (case["block"] == "balanced" and "context" in case["mesh"])
        and not (case["unroll_repeats"] and case["gather"] == "per_iteration")
        and not (case["unroll_repeats"] and case["repeats"] * case["layers"] > 2)  # compiles long
    )


def check(case):
    values = {
        "pipeline.engine": "circular",
        "pipeline.scan_repeats": not case["unroll_repeats"],
    } | (CUSTOM if case["remat"] == "custom" else {})
    fill = math.nan if case["nan_bubbles"] else None
    config = config_of(case, **values)
    assert_equals_one_device(config, packed=case["packed"], bubble_fill=fill)


def pairwise():
    turns = {remat: cycle(policies) for remat, policies in ALIKE.items()}
    for case in covering_array(FACTORS, is_legal, CONSTRAINED):
        yield case | ({"remat": next(turns[case["remat"]])} if case["remat"] in turns else {})


def full_product():
    yield from sampled_product(
        FACTORS, ("stages", "repeats", "layers", "microbatches", "delay"), is_legal
    )
    factors = FACTORS | {"stages": (2, 4), "repeats": (2, 4), "remat": tuple(REMAT_POLICIES)}
    yield from sampled_product(
        factors, ("stages", "repeats", "microbatches", "delay", "gather", "remat"), is_legal
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", named(pairwise()))
def test_circular_equals_one_device_for_every_pair_of_options(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", every_nth(full_product(), 17))
def test_circular_equals_one_device_in_the_full_product(case):
    check(case)


def small(words, rules):
    common = "engine=circular stage=2 num_repeats=2 num_microbatches=6 fsdp=2 global_batch_size=24 "
    return tiny(common + words, **{"sharding.logical_axis_rules": rules})


ROWS_OF_DATA = [["activation_batch", ["data"]], *DEFAULT_RULES[1:]]
LAYERS_OVER_FSDP = [
    [name, {"layers_per_stage": ["fsdp"], "embed": []}.get(name, axes)]
    for name, axes in DEFAULT_RULES
]


@pytest.mark.parametrize("gather", ["per_iteration", "per_repeat", "once"])
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        # Gradients of gathered weights are summed over all devices, so each needs rows of its own.
        (ROWS_OF_DATA, "fsdp_gather={} needs rows over all of data, "),
        (LAYERS_OVER_FSDP, r"layers_per_stage over no part of fsdp; use \["),
    ],
    ids=["rows", "layers"],
)
def test_rules_that_weights_cannot_be_kept_under_are_refused(rules, message, gather):
    assert DEFAULT_RULES[0][0] == "activation_batch"
    config = small(f"num_layers=8 fsdp_gather={gather}", rules)
    if gather == "per_iteration":
        EngineUnderTest(config)
        return
    with pytest.raises(ConfigError, match=message.format(gather)):
        EngineUnderTest(config)
