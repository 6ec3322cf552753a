"""The circular engine computes the loss and every gradient of the sequential one, whatever its options."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import PipelineUnderTest, assert_same, make_batch, reference, tiny
from pairwise import covering_array, legal_pairs, pairs_of, rotating_product

from maxpipe.pipeline.conveyor import Conveyor

ROWS = 96  # every number of microbatches below, times data x fsdp, divides it

FACTORS = {
    "stages": (1, 2, 4),
    "repeats": (1, 2, 4),
    "layers": (1, 2),
    "microbatches": (1, 2, 3, 4),  # times stages
    "mesh": ("", "data", "fsdp", "tensor", "data fsdp tensor"),  # these axes have two devices
    "packed": (True, False),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "remat": ("full", "minimal", "none"),
    "delay": (False, True),
    "uneven": (False, True),
    "gather": ("per_iteration", "per_repeat", "once"),
    "scan": (True, False),
    "nan_bubbles": (False, True),
}
# The full product is taken of these; in it the others go round.
GRID = ("stages", "repeats", "layers", "microbatches", "packed", "tied", "dropout")
# All that `is_legal` looks at.
CONSTRAINED = ("stages", "repeats", "microbatches", "mesh", "delay", "uneven")


def is_legal(case):
    return (
        case["stages"] * 2 ** len(case["mesh"].split()) <= 8
        and case["microbatches"] > case["delay"]  # delayed forwarding needs two microbatches a stage
        and case["stages"] * case["repeats"] > case["uneven"]
    )


def chunk_sizes(case):
    chunks = case["stages"] * case["repeats"]
    other = 3 - case["layers"]
    return [other if case["uneven"] and i % 3 == 1 else case["layers"] for i in range(chunks)]


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
    flags = filter(case.get, ("packed", "tied", "dropout", "delay", "uneven", "scan", "nan_bubbles"))
    return "-".join([numbers, *case["mesh"].split(), *flags, case["remat"], case["gather"]])


PAIRWISE = covering_array(FACTORS, is_legal, CONSTRAINED)


def check(case):
    config = config_of(case)
    pipeline = PipelineUnderTest(config, bubble_fill=math.nan if case["nan_bubbles"] else None)
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
        ("stages", 2, "mesh", "data fsdp tensor"),
        ("stages", 4, "mesh", "data fsdp tensor"),
        ("microbatches", 1, "delay", True),
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


def sequential_like(config):
    return tiny(
        **{
            "pipeline.engine": "sequential",
            "data.global_batch_size": config.data.global_batch_size,
            "model.num_layers": config.model.num_layers,
            "model.dtype": config.model.dtype,
        }
    )


@pytest.mark.parametrize("rows", [24, 8, 72, 10])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pipeline.delay_activation_forwarding": True},
        {"pipeline.layers_per_stage": [1, 3, 1, 2], "model.num_layers": 7, "pipeline.fsdp_gather": "once"},
    ],
    ids=["plain", "delay", "uneven"],
)
def test_evaluation_takes_any_batch_size(values, rows):
    """As large as the training batch, smaller, larger, and not divisible by the microbatches."""
    config, batch = small(**values), make_batch(rows, seed=1)
    expected = PipelineUnderTest(sequential_like(config)).evaluate(batch)
    actual = PipelineUnderTest(config, bubble_fill=math.nan).evaluate(batch)
    assert actual == pytest.approx(expected, rel=1e-5)


def test_bfloat16_compute_stays_close_to_the_sequential_engine():
    """Stages, microbatches and FSDP may round differently, no more than bfloat16 itself does."""
    config, batch = small(**{"model.dtype": "bfloat16"}), make_batch(24)
    actual = PipelineUnderTest(config).train(batch)
    expected = PipelineUnderTest(sequential_like(config)).train(batch)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(actual.gradients))
    assert_same(actual, expected, tolerance=3e-2)


def test_a_microbatch_without_weights_counts_for_nothing_and_the_others_for_all():
    """The loss is divided once, by the weights of the whole batch: no mean of microbatch means."""
    batch = make_batch(24)
    batch["weights"][1::6] = 0
    config = small()
    expected = PipelineUnderTest(sequential_like(config)).train(batch)
    assert_same(PipelineUnderTest(config).train(batch), expected)


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize(
    ("S", "V", "M"), [(1, 1, 2), (1, 3, 4), (2, 1, 4), (2, 3, 6), (3, 2, 6), (3, 1, 9), (5, 2, 10)]
)
def test_conveyor_brings_every_microbatch_to_every_chunk(S, V, M, delay):
    """Each cell holds 100 * microbatch + chunks seen; stage s of repeat v must be chunk v * S + s of it."""
    conveyor = Conveyor(S, V, M, delay)
    assert conveyor.num_iterations == M * V + delay * (S - 1)
    io = jnp.asarray(100 * conveyor.start)[..., None, None, None]
    shift, pending = jnp.full((S, 1, 1, 1), -1), jnp.full((S, 1, 1, 1), -1)
    for t in range(conveyor.num_iterations):
        x = shift.at[0].set(conveyor.read(io, t)[0])
        for s in range(S):
            n = t - delay * s
            if 0 <= n < M * V:
                assert x[s].item() == 100 * (n % M) + n // M * S + s, (t, s)
        leaving, pending = (x + 1, x + 1) if delay == 1 else (pending, x + 1)
        io = conveyor.advance(io, leaving, t)
        shift = jnp.roll(leaving, 1, axis=0)
    if delay == 2:
        io = conveyor.advance(io, pending, conveyor.num_iterations)
    np.testing.assert_array_equal(io[..., 0, 0, 0], 100 * conveyor.end + S * V)
    assert sorted(conveyor.end.flat) == list(range(M))
