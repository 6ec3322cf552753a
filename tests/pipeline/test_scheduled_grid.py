"""The scheduled engine computes the loss and every gradient of the sequential one, whatever its options."""

import math
from pathlib import Path

import pytest
from engines import PipelineUnderTest, assert_same, make_batch, reference, tiny
from pairwise import covering_array, legal_pairs, pairs_of, rotating_product

from maxpipe.model import blocks

# A variant is a module: the test's own block is one more.
blocks.__path__.append(str(Path(__file__).parent / "blocks"))

ROWS = 96  # every number of microbatches below, times data x fsdp, divides it

FACTORS = {
    "stages": (1, 2, 4),
    "repeats": (1, 2, 4),
    "layers": (1, 2),
    # times stages; fractions are fewer microbatches than stages, and numbers that the stages do not divide
    "microbatches": (0.5, 1, 1.5, 4),
    "mesh": ("", "fsdp", "tensor", "data fsdp", "fsdp tensor", "data fsdp tensor"),  # two devices each
    "packed": (True, False),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "block": ("llama", "balanced"),
    "remat": ("full", "minimal", "none"),
    "remat_of": ("iterations", "layers", "iterations layers", ""),
    "delay": (False, True),
    "overlap": (False, True),
    "skip_idle": ("true", "false"),
    "uneven": (False, True),
    "gather": ("per_iteration", "once"),
    "scan": (True, False),
    "nan_idle": (False, True),
}
# The full product is taken of these; in it the others go round.
GRID = ("stages", "repeats", "layers", "microbatches", "mesh", "delay", "overlap", "skip_idle")
# All that `is_legal` looks at.
CONSTRAINED = ("stages", "repeats", "microbatches", "mesh", "uneven", "remat", "remat_of")


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        and case["stages"] * case["microbatches"] % 1 == 0
        and case["stages"] * case["repeats"] > case["uneven"]
        and not (case["remat"] == "none" and "layers" in case["remat_of"])
    )


def chunk_sizes(case):
    chunks = case["stages"] * case["repeats"]
    other = 3 - case["layers"]
    return [other if case["uneven"] and i % 3 == 1 else case["layers"] for i in range(chunks)]


def config_of(case):
    return tiny(
        **{
            "pipeline.engine": "scheduled",
            "pipeline.schedule": "lockstep_1f1b",
            "pipeline.num_repeats": case["repeats"],
            "pipeline.layers_per_stage": chunk_sizes(case) if case["uneven"] else [],
            "pipeline.num_microbatches": int(case["stages"] * case["microbatches"]),
            "pipeline.delay_activation_forwarding": case["delay"],
            "pipeline.overlap_slots": case["overlap"],
            "pipeline.skip_idle": case["skip_idle"],
            "pipeline.fsdp_gather": case["gather"],
            "pipeline.scan_layers_per_stage": case["scan"],
            "pipeline.remat_policy": case["remat"],
            "pipeline.remat_iterations": "iterations" in case["remat_of"],
            "pipeline.remat_layers": "layers" in case["remat_of"],
            "model.block": case["block"],
            "model.num_layers": sum(chunk_sizes(case)),
            "model.tie_embeddings": case["tied"],
            "model.dropout": case["dropout"],
            "model.qk_norm": True,
            "model.attention_bias": True,
            "model.z_loss": 1e-2,
            "model.logit_soft_cap": 5.0,
            "data.global_batch_size": ROWS,
            "mesh.ici.stage": case["stages"],
        }
        | {f"mesh.ici.{axis}": 2 for axis in case["mesh"].split()}
    )


def name_of(case):
    numbers = "S{stages}-V{repeats}-L{layers}-M{microbatches}S".format(**case)
    flags = filter(case.get, ("packed", "tied", "dropout", "delay", "overlap", "uneven", "scan", "nan_idle"))
    skip = "skip" if case["skip_idle"] == "true" else "mask"
    remat = [case["remat"], *case["remat_of"].split()]
    return "-".join([numbers, *case["mesh"].split(), case["block"], *flags, skip, *remat, case["gather"]])


PAIRWISE = covering_array(FACTORS, is_legal, CONSTRAINED)


def check(case):
    config = config_of(case)
    pipeline = PipelineUnderTest(config, idle_fill=math.nan if case["nan_idle"] else 0.0)
    actual = pipeline.train(make_batch(ROWS, packed=case["packed"]))
    assert_same(actual, reference(config.model, ROWS, packed=case["packed"]))


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_equals_sequential(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", rotating_product(FACTORS, GRID, is_legal), ids=name_of)
def test_equals_sequential_in_the_full_product(case):
    check(case)


def test_every_pair_of_options_is_run():
    assert all(map(is_legal, PAIRWISE))
    assert set().union(*map(pairs_of, PAIRWISE)) == legal_pairs(FACTORS, is_legal, CONSTRAINED)


def test_few_pairs_of_options_are_impossible():
    """Only what the devices or the options themselves exclude stays out."""
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
