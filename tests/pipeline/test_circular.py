"""The circular engine computes the loss and every gradient of the sequential one, whatever its options."""

import math

import pytest
from engines import PipelineUnderTest, assert_same, make_batch, reference, tiny
from pairwise import all_cases, covering_array, legal_pairs, pairs_of

ROWS = 96  # every number of microbatches below, times data x fsdp, divides it

FACTORS = {
    "stages": (1, 2, 4),
    "repeats": (1, 2, 4),
    "layers": (1, 2),
    "microbatches": (1, 2, 3, 4),  # times stages
    "mesh": ("", "data", "fsdp", "tensor", "fsdp tensor", "data fsdp tensor"),  # these axes have two devices
    "packed": (True, False),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "remat": ("full", "minimal", "none"),
    "delay": (False, True),
    "uneven": (False, True),
    "gather": ("per_iteration", "once"),
    "scan": (True, False),
    "nan_bubbles": (False, True),
}
# The full product is taken of these; in it the others go round.
GRID = ("stages", "repeats", "layers", "microbatches", "packed", "tied", "dropout")


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        and case["microbatches"] > case["delay"]  # delayed forwarding needs two microbatches a stage
        and case["stages"] * case["repeats"] > case["uneven"]
    )


def chunk_sizes(case):
    chunks = case["stages"] * case["repeats"]
    return [case["layers"] + (case["uneven"] and i % 3 == 1) for i in range(chunks)]


def config_of(case):
    return tiny(
        **{
            "pipeline.engine": "circular",
            "pipeline.num_repeats": case["repeats"],
            "pipeline.layers_per_stage": chunk_sizes(case) if case["uneven"] else [],
            "pipeline.num_microbatches": case["stages"] * case["microbatches"],
            "pipeline.delay_activation_forwarding": case["delay"],
            "pipeline.fsdp_gather": case["gather"],
            "pipeline.scan_layers_per_stage": case["scan"],
            "pipeline.remat_policy": case["remat"],
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
    flags = [flag for flag in ("packed", "tied", "dropout", "delay", "uneven", "scan", "nan_bubbles") if case[flag]]
    return "-".join([numbers, *case["mesh"].split(), *flags, case["remat"], case["gather"]])


def grid_cases():
    """The full product of the options in GRID; the others take every legal combination in turn."""
    others = list(all_cases({name: values for name, values in FACTORS.items() if name not in GRID}))
    at = 0
    for core in all_cases({name: FACTORS[name] for name in GRID}):
        # A step without a common divisor with the number of combinations visits all of them.
        while not is_legal(case := core | others[at := (at + 89) % len(others)]):
            pass
        yield case


PAIRWISE = covering_array(FACTORS, is_legal)


def check(case):
    config = config_of(case)
    pipeline = PipelineUnderTest(config, bubble_fill=math.nan if case["nan_bubbles"] else None)
    actual = pipeline.train(make_batch(ROWS, packed=case["packed"]))
    assert_same(actual, reference(config.model, ROWS, packed=case["packed"]))


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_equals_sequential(case):
    check(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", grid_cases(), ids=name_of)
def test_equals_sequential_in_the_full_product(case):
    check(case)


def test_every_pair_of_options_is_run():
    assert all(map(is_legal, PAIRWISE))
    assert set().union(*map(pairs_of, PAIRWISE)) == legal_pairs(FACTORS, is_legal)


def test_few_pairs_of_options_are_impossible():
    """Only what the devices or the options themselves exclude stays out."""
    everything = legal_pairs(FACTORS, lambda case: True)
    assert everything - legal_pairs(FACTORS, is_legal) == {
        ("stages", 2, "mesh", "data fsdp tensor"),
        ("stages", 4, "mesh", "data fsdp tensor"),
        ("stages", 4, "mesh", "fsdp tensor"),
        ("microbatches", 1, "delay", True),
    }
