"""What the circular engine's options change in its program: residuals, loops, loop state."""

import math
from itertools import product

import jax
import pytest
from helpers.engines import (
    SEQUENCE_LENGTH,
    EngineUnderTest,
    assert_equals_one_device,
    make_batch,
    tiny,
)

from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

ROWS = 16
# What is rematerialised: iterations, layers, both or neither.
REMATERIALISED = ("iterations", "layers", "both", "neither")


def circular(words):
    return tiny(
        "schedule=circular num_repeats=2 num_microbatches=4 num_layers=8 embed_dim=24 "
        f"num_query_heads=6 num_kv_heads=3 mlp_dim=40 global_batch_size={ROWS} stage=2 fsdp=2 "
        + words
    )


def residual_shapes(config):
    subject = EngineUnderTest(config)
    batch, key = make_batch(ROWS), jax.random.key(0)

    def residuals(params):
        return jax.tree.leaves(jax.vjp(lambda p: subject.pipeline.loss(p, batch, key), params)[1])

    return [leaf.shape for leaf in jax.eval_shape(residuals, subject.params)]


@pytest.mark.parametrize(
    ("dtype", "scan_layers"),
    [("float32", True), ("bfloat16", False)],
    ids=["float32-scan", "bfloat16-unroll"],
)
@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("none", "iterations"),
        ("minimal_offloaded", "iterations"),
        *product(("full", "minimal"), REMATERIALISED),
    ],
)
def test_residuals_contain_no_weights_of_an_iteration(policy, flags, dtype, scan_layers):
    """The forward hands the backward nothing in the shape of a weight except the parameters."""
    iterations, layers = flags in ("iterations", "both"), flags in ("layers", "both")
    config = circular(
        f"remat_policy={policy} remat_iterations={iterations} remat_layers={layers} "
        f"scan_layers_per_stage={scan_layers} dtype={dtype}"
    )
    weights = {(24, 6, 4), (24, 3, 4), (6, 4, 24), (24, 40), (40, 24)}
    shapes = residual_shapes(config)
    of_weights = [shape for shape in shapes if any(shape[-len(w) :] == w for w in weights)]
    # One leaf [repeats, stages, layers, ...] of each: query, key, value, out, gate, up, down.
    assert len(of_weights) == 7
    assert {shape[:3] for shape in of_weights} == {(2, 2, 2)}


def loops(config):
    """Return (trip count, shapes of the carry) of every loop in the forward."""
    subject = EngineUnderTest(config)
    rows = make_batch(config.data.global_batch_size)
    found = []

    def walk(jaxpr):
        for eqn in open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name == "scan":
                # What is stacked has a dimension more outside.
                inside = [v.aval.shape for v in open_jaxpr(eqn.params["jaxpr"]).outvars]
                outside = [v.aval.shape for v in eqn.outvars]
                carried = [a for a, b in zip(outside, inside, strict=True) if a == b]
                found.append((eqn.params["length"], carried))
            for inner in inner_jaxprs(eqn):
                walk(inner)

    walk(jax.make_jaxpr(subject.pipeline.loss)(subject.params, rows, jax.random.key(0)))
    return found


@pytest.mark.parametrize(
    ("repeats", "microbatches", "delay"), [(1, 2, 1), (3, 2, 1), (3, 8, 1), (1, 4, 2), (3, 8, 2)]
)
def test_loop_state_holds_the_microbatches_and_what_stages_send(repeats, microbatches, delay):
    """Inputs, activations between repeats, and outputs share M slots; d S are between stages."""
    config = circular(
        f"num_repeats={repeats} num_microbatches={microbatches} num_layers={2 * repeats} "
        f"delay_activation_forwarding={delay == 2}"
    )
    iterations = microbatches * repeats + delay
    (carried,) = [shapes for length, shapes in loops(config) if length == iterations]
    per_device = ROWS // microbatches, SEQUENCE_LENGTH, 24
    activations = [shape for shape in carried if shape[-3:] == per_device]
    assert carried == activations  # a dense model has no auxiliary losses
    assert sum(math.prod(shape[:-3]) for shape in activations) == microbatches + delay * 2


@pytest.mark.parametrize("gather", ["per_repeat", "once"])
def test_loop_state_without_a_backward_holds_no_residuals(gather):
    """Residuals of all M V + S - 1 iterations would be one array."""
    scans = loops(circular(f"fsdp_gather={gather}"))
    assert scans
    assert not any(shape[:1] == (4 * 2 + 1,) for _, carried in scans for shape in carried)


@pytest.mark.parametrize(
    ("option", "gather", "length"),
    [
        ("scan_iterations", "per_iteration", 33),  # M V + S - 1
        ("scan_iterations", "per_repeat", 7),  # M - (S - 1)
        ("scan_repeats", "per_repeat", 3),  # V - 1
        ("scan_repeats", "once", 3),
        ("scan_layers_per_stage", "per_iteration", 5),  # L
        ("scan_layers_per_stage", "per_repeat", 5),
    ],
)
def test_scan_options_compile_a_loop_or_copies(option, gather, length):
    words = f"num_repeats=4 num_microbatches=8 num_layers=40 fsdp_gather={gather} {option}="
    assert any(length == n for n, _ in loops(circular(words + "true")))
    assert not any(length == n for n, _ in loops(circular(words + "false")))


@pytest.mark.parametrize(
    "words",
    ["remat_policy=full"]
    + [
        pytest.param(f"remat_policy=minimal {words}", marks=pytest.mark.slow)
        for words in ("", "moe.experts=4 moe.mlp_dim=8")
    ],
)
def test_stores_of_residuals_are_written_before_they_are_read(words, monkeypatch):
    """Nothing fills them on TPUs and GPUs, so they may hold anything; here NaN."""
    shapes = []

    def anything(shape, dtype):
        shapes.append(shape)
        is_float = jax.numpy.issubdtype(dtype, jax.numpy.floating)
        return jax.numpy.full(shape, jax.numpy.nan if is_float else 2**30, dtype)

    monkeypatch.setattr(jax.lax, "empty", anything)
    assert_equals_one_device(circular(f"fsdp_gather=per_repeat num_layers=4 {words}"))
    iterations = 4 * 2 + 1  # M V + S - 1
    assert shapes
    assert all(shape[:2] == (iterations, 1) for shape in shapes)  # one stage on each device


@pytest.mark.parametrize("changes", ["tensor=3 fsdp=1", "scan_layers_per_stage=true"])
def test_stores_of_residuals_are_filled_where_other_dimensions_are_split(changes, monkeypatch):
    """The partitioner gives every device the whole of an array that nothing fills."""

    def refused(shape, dtype):
        raise AssertionError(shape)

    monkeypatch.setattr(jax.lax, "empty", refused)
    subject = EngineUnderTest(circular(f"fsdp_gather=per_repeat remat_policy=minimal {changes}"))
    jax.eval_shape(subject.pipeline.loss_and_gradients, subject.params, make_batch(ROWS), None)
