"""Options of the circular engine that change what is kept, computed again or fetched, but no result."""

import math
from itertools import product

import jax
import pytest
from engines import TOLERANCE, PipelineUnderTest, assert_same, make_batch, reference, tiny
from pairwise import covering_array, legal_pairs, pairs_of, rotating_product

from maxpipe.pipeline.remat import REMAT

ROWS = 16
CUSTOM = {"pipeline.remat_tensors.query_proj": "device", "pipeline.remat_tensors.mlp_up": "offload"}
# What is rematerialised: whole iterations, single layers, both or neither.
REMATERIALISED = ("iterations", "layers", "both", "neither")

FACTORS = {
    "stages": (2, 4),
    "repeats": (2, 3),
    "layers": (1, 2),
    "microbatches": (1, 2, 4),  # times stages
    "delay": (False, True),
    "gather": ("per_iteration", "per_repeat", "once"),
    "mesh": ("", "data", "fsdp", "tensor"),  # this axis has two devices
    "remat": tuple(REMAT.names()),
    "rematerialised": REMATERIALISED,
    "outside": (0, 1, 3),
    "outside_layers": ("after", "before"),
    "unrolled": ("", "scan_layers_per_stage", "scan_repeats"),
    "packed": (True, False),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "nan_bubbles": (False, True),
}
CONSTRAINED = (
    "stages", "layers", "microbatches", "delay", "remat", "rematerialised", "outside", "outside_layers", "gather",
    "unrolled",
)  # fmt: skip
# The full product is taken of these; in it the others go round.
GRID_REPEATS = (2, 4)
GRID = ("stages", "repeats", "microbatches", "delay", "gather", "remat")
GRID_ROWS = 64  # every number of microbatches above, times two shards, divides it


def is_legal(case):
    return (
        case["microbatches"] > case["delay"]
        # Larger ones take long to compile; the test below has four stages of four repeats.
        and case["stages"] * case["layers"] <= 4
        and not (case["stages"] == 4 and case["unrolled"] == "scan_repeats")
        and not (case["remat"] == "none" and case["rematerialised"] in ("layers", "both"))
        and not (case["outside"] == 0 and case["outside_layers"] == "before")
        and not (case["gather"] == "per_iteration" and case["unrolled"] == "scan_repeats")
    )


def config_of(case):
    inside = case["stages"] * case["repeats"] * case["layers"]
    values = {
        "pipeline.engine": "circular",
        "pipeline.num_repeats": case["repeats"],
        "pipeline.num_microbatches": case["stages"] * case["microbatches"],
        "pipeline.delay_activation_forwarding": case["delay"],
        "pipeline.fsdp_gather": case["gather"],
        "pipeline.remat_policy": case["remat"],
        "pipeline.remat_iterations": case["rematerialised"] in ("iterations", "both"),
        "pipeline.remat_layers": case["rematerialised"] in ("layers", "both"),
        "pipeline.parallel_layers": inside,
        "pipeline.outside_layers": case["outside_layers"],
        "model.num_layers": inside + case["outside"],
        "model.tie_embeddings": case["tied"],
        "model.dropout": case["dropout"],
        "data.global_batch_size": GRID_ROWS,
        "mesh.ici.stage": case["stages"],
    }
    if case["mesh"]:
        values[f"mesh.ici.{case['mesh']}"] = 2
    if case["unrolled"]:
        values[f"pipeline.{case['unrolled']}"] = False
    return tiny(**values | (CUSTOM if case["remat"] == "custom" else {}))


def name_of(case):
    numbers = "S{stages}-V{repeats}-L{layers}-M{microbatches}S-{outside}{outside_layers}".format(**case)
    flags = [flag for flag in ("packed", "tied", "dropout", "delay", "nan_bubbles") if case[flag]]
    words = [case[name] for name in ("mesh", "gather", "remat", "rematerialised", "unrolled")]
    return "-".join([numbers, *flags, *filter(None, words)])


PAIRWISE = covering_array(FACTORS, is_legal, CONSTRAINED)


def check_case(case):
    config = config_of(case)
    subject = PipelineUnderTest(config, bubble_fill=math.nan if case["nan_bubbles"] else None)
    actual = subject.train(make_batch(GRID_ROWS, packed=case["packed"]))
    assert_same(actual, reference(config.model, GRID_ROWS, packed=case["packed"]))


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_equals_sequential(case):
    check_case(case)


@pytest.mark.grid
@pytest.mark.parametrize("case", rotating_product(FACTORS | {"repeats": GRID_REPEATS}, GRID, is_legal), ids=name_of)
def test_equals_sequential_in_the_full_product(case):
    check_case(case)


@pytest.mark.parametrize(
    ("gather", "microbatches", "delay"), [("per_repeat", 4, False), ("per_repeat", 16, True), ("once", 4, False)]
)
def test_four_stages_of_four_repeats(gather, microbatches, delay):
    values = {
        "pipeline.engine": "circular",
        "pipeline.fsdp_gather": gather,
        "pipeline.num_repeats": 4,
        "pipeline.num_microbatches": microbatches,
        "pipeline.delay_activation_forwarding": delay,
        "model.num_layers": 16,
        "mesh.ici.stage": 4,
        "mesh.ici.fsdp": 2,
        "data.global_batch_size": 32,
    }
    config = tiny(**values)
    actual = PipelineUnderTest(config, bubble_fill=math.nan).train(make_batch(32))
    assert_same(actual, reference(config.model, 32))


def test_every_pair_of_options_is_run():
    assert all(map(is_legal, PAIRWISE))
    assert set().union(*map(pairs_of, PAIRWISE)) == legal_pairs(FACTORS, is_legal, CONSTRAINED)


def circular(**values):
    """Two stages x two FSDP shards, two repeats of two layers, sizes that tell every weight by its shape."""
    return tiny(
        **{
            "pipeline.engine": "circular",
            "pipeline.num_repeats": 2,
            "pipeline.num_microbatches": 4,
            "model.num_layers": 8,
            "model.embed_dim": 24,
            "model.num_query_heads": 6,
            "model.num_kv_heads": 3,
            "model.mlp_dim": 40,
            "data.global_batch_size": ROWS,
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
        }
        | values
    )


def kept_values(config):
    """Shapes of all that the forward pass hands to the backward pass."""
    subject = PipelineUnderTest(config)
    batch = {name: jax.numpy.asarray(x) for name, x in make_batch(ROWS).items()}

    def residuals(params):
        key = jax.random.key(0)
        return jax.tree.leaves(jax.vjp(lambda p: subject.pipeline.loss(p, batch, key), params)[1])

    return [leaf.shape for leaf in jax.eval_shape(residuals, subject.params)]


@pytest.mark.parametrize(
    ("dtype", "scan_layers"), [("float32", True), ("bfloat16", False)], ids=["float32-scan", "bfloat16-unroll"]
)
@pytest.mark.parametrize(
    ("policy", "flags"),
    [("none", "iterations"), *product(("full", "minimal", "minimal_offloaded"), REMATERIALISED)],
)
def test_no_iteration_keeps_weights(policy, flags, dtype, scan_layers):
    """The forward pass hands on nothing in the shape of a weight but the parameters themselves."""
    config = circular(
        **{
            "pipeline.remat_policy": policy,
            "pipeline.remat_iterations": flags in ("iterations", "both"),
            "pipeline.remat_layers": flags in ("layers", "both"),
            "pipeline.scan_layers_per_stage": scan_layers,
            "model.dtype": dtype,
        }
    )
    weights = {(24, 6, 4), (24, 3, 4), (6, 4, 24), (24, 40), (40, 24)}
    found = [shape for shape in kept_values(config) if any(shape[-len(w) :] == w for w in weights)]
    # One leaf [repeats, stages, layers, ...] of each: query, key, value, out, gate, up, down.
    assert len(found) == 7
    assert {shape[:3] for shape in found} == {(2, 2, 2)}


@pytest.mark.parametrize("gather", ["per_iteration", "per_repeat"])
def test_iterations_can_be_copies(gather):
    values = {"pipeline.scan_iterations": False, "pipeline.fsdp_gather": gather, "model.num_layers": 4}
    config = circular(**values)
    assert_same(PipelineUnderTest(config).train(make_batch(ROWS)), reference(config.model, ROWS))


@pytest.mark.parametrize("gather", ["per_repeat", "once"])
@pytest.mark.parametrize("rows", [4, 16, 18])
def test_evaluation_does_not_depend_on_the_gather(gather, rows):
    batch = make_batch(rows, seed=1)
    values = {"pipeline.parallel_layers": 4, "model.num_layers": 5}
    actual = PipelineUnderTest(circular(**values, **{"pipeline.fsdp_gather": gather})).evaluate(batch)
    sequential = {"pipeline.engine": "sequential", "mesh.ici.stage": 1, "mesh.ici.fsdp": 1, "model.num_layers": 5}
    expected = PipelineUnderTest(circular(**sequential)).evaluate(batch)
    assert actual == pytest.approx(expected, rel=TOLERANCE)
