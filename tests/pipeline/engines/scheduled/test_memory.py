"""What the scheduled engine stores: units in flight as the table says, and no weights with them."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_engine, build_engine_inputs
from maxpipe.model.parameters import ParamSpec
from maxpipe.pipeline.engines.scheduled.stage_program import StageProgram
from maxpipe.pipeline.microbatches import ARRAYS
from maxpipe.pipeline.weights import Weights
from maxpipe.plan.layer_costs import saving_of
from maxpipe.plan.simulate import simulate

# No activation has as many elements as a weight, full or sharded, of one layer or of all.
T, D, HEADS, KV_HEADS, HEAD_DIM, MLP = 13, 24, 6, 3, 4, 40
MODEL = (
    f"num_layers=8 embed_dim={D} num_query_heads={HEADS} num_kv_heads={KV_HEADS} mlp_dim={MLP} "
    f"sequence_length={T} "
)


def scheduled(words):
    return tiny(f"{MODEL} engine=scheduled schedule=lockstep_1f1b stage=2 {words}")


def abstract_arguments(config, pipeline, parts):
    leading = pipeline.layer_index().shape
    weights = Weights(parts.rules, parts.program.specs, pipeline.layer_axes, leading)
    rows = parts.rules.sharding(("activation_batch", "activation_length"))
    shape = config.data.global_batch_size, config.data.sequence_length
    dtypes = {name: jnp.float32 if name == "weights" else jnp.int32 for name in ARRAYS}
    batch = {n: jax.ShapeDtypeStruct(shape, d, sharding=rows) for n, d in dtypes.items()}
    return weights.abstract(), batch, jax.eval_shape(lambda: jax.random.key(0))


class Traced(Exception):
    """Ends the trace of a step once its stores are known; they are its argument."""


def stores(config, monkeypatch):
    """Trace a training step up to the loops over ticks; return shapes inside a stage's program."""

    def run(self, plan, vjp, carry):
        raise Traced(
            SimpleNamespace(
                residuals=vjp.residuals,  # of one unit
                carry=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), carry),
                layers=jax.tree.leaves(self.layers),
                microbatch_rows=self.batch["tokens"].shape[0],
                plan=plan,
            )
        )

    monkeypatch.setattr(StageProgram, "run", run)
    parts = build_engine_inputs(config, make_mesh(config))
    pipeline = build_engine(config, parts)
    with pytest.raises(Traced) as traced:
        jax.eval_shape(pipeline.loss_and_gradients, *abstract_arguments(config, pipeline, parts))
    return traced.value.args[0]


def num_bytes(arrays):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


@pytest.mark.parametrize(("S", "V", "M"), [(1, 2, 8), (2, 1, 16), (2, 4, 8), (4, 1, 8), (4, 2, 16)])
def test_residual_store_has_the_slots_of_the_tables_peak(S, V, M, monkeypatch):
    """(V+1)S-1-2s units are in flight on stage s; one slot more is scratch."""
    config = scheduled(f"stage={S} num_repeats={V} num_microbatches={M}")
    program_stores = stores(config, monkeypatch)
    table = build_engine_inputs(config, make_mesh(config)).table
    peak = [(V + 1) * S - 1 - 2 * s for s in range(S)]
    np.testing.assert_array_equal(simulate(table).peak_in_flight, peak)
    (residuals,) = program_stores.carry.residuals
    assert residuals.shape == (peak[0] + 1, 16 // M, T, D)
    assert program_stores.carry.activations.shape[0] == program_stores.plan.sizes.activations + 1
    assert program_stores.carry.gradients.shape[0] == program_stores.plan.sizes.gradients + 1


@pytest.mark.parametrize(
    ("axis", "gather", "cast"),
    [
        ("data", "per_iteration", True),
        ("tensor", "per_iteration", True),
        ("fsdp", "per_iteration", False),
        ("fsdp", "once", True),
    ],
)
def test_layers_that_units_do_not_gather_are_cast_before_the_loop(axis, gather, cast, monkeypatch):
    """XLA would cast those that no axis splits for every use of every loop, and hold all."""
    config = scheduled(f"dtype=bfloat16 {axis}=2 fsdp_gather={gather}")
    layers = stores(config, monkeypatch).layers
    matrices = {layer.dtype for layer in layers if math.prod(layer.shape[2:]) > D}
    assert matrices == {jnp.dtype("bfloat16" if cast else "float32")}


@pytest.mark.parametrize(
    ("S", "V", "M", "delay"), [(2, 2, 8, False), (4, 1, 8, True), (4, 2, 16, False)]
)
def test_stores_of_split_backwards_have_the_slots_of_the_tables_peaks(S, V, M, delay, monkeypatch):
    """Residuals are as for full backwards; d(S-1)+1 stashed units, no larger than residuals."""
    words = f"stage={S} num_repeats={V} num_microbatches={M} remat_policy=minimal "
    words += f"delay_activation_forwarding={delay}"
    config = scheduled(f"{words} schedule=lockstep_zb")
    split, full = (stores(c, monkeypatch) for c in (config, scheduled(words)))
    run = simulate(build_engine_inputs(config, make_mesh(config)).table)
    assert {a.shape[0] for a in split.carry.residuals} == {run.peak_in_flight.max() + 1}
    assert split.carry.residuals == full.carry.residuals
    assert run.peak_stash.max() == (delay + 1) * (S - 1) + 1
    assert {a.shape[0] for a in split.carry.stash} == {run.peak_stash.max() + 1}
    assert num_bytes(split.carry.stash) / (run.peak_stash.max() + 1) <= num_bytes(split.residuals)
    assert full.carry.stash == []


@pytest.mark.parametrize("policy", ["full", "minimal", "none"])
@pytest.mark.parametrize(
    ("dtype", "scan", "gather"),
    [
        ("float32", "true", "per_iteration"),
        ("bfloat16", "true", "once"),
        ("bfloat16", "false", "per_iteration"),
    ],
)
def test_residuals_of_any_remat_policy_hold_no_weight(policy, dtype, scan, gather, monkeypatch):
    config = scheduled(
        f"remat_policy={policy} scan_layers_per_stage={scan} fsdp_gather={gather} num_repeats=2 "
        f"dtype={dtype} qk_norm=true attention_bias=true fsdp=2"
    )
    program_stores = stores(config, monkeypatch)
    program = build_engine_inputs(config, make_mesh(config)).program
    specs = jax.tree.leaves(program.specs["layers"], is_leaf=lambda x: isinstance(x, ParamSpec))
    weights = {math.prod(spec.shape) for spec in specs} | {
        math.prod(p.shape[2:]) for p in program_stores.layers
    }
    layers = config.pipeline.num_layers_per_stage
    sizes = {math.prod(residual.shape) for residual in program_stores.residuals}
    assert not sizes & {count * size for size in weights for count in (1, layers)}
    tokens = program_stores.microbatch_rows * T
    assert all(size % tokens == 0 for size in sizes), "a residual that is not per token"
    per_token = num_bytes(program_stores.residuals) / tokens / jnp.dtype(dtype).itemsize
    queries_keys_values = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    minimal = queries_keys_values + HEADS * HEAD_DIM + 2 * D + 2 * MLP
    # The chunk's input besides them; results that no gradient needs are not stored.
    least, most = {
        "full": (0, 0),
        "minimal": (queries_keys_values, minimal),
        "none": (minimal, math.inf),
    }[policy]
    assert least * layers + D <= per_token <= most * layers + D


@pytest.mark.parametrize(
    ("policy", "unknown"), [("minimal", 0), ("none", 0), ("save_qkv_proj", 0.1)]
)
def test_stash_of_a_layer_has_the_width_that_the_footprint_predicts(policy, unknown, monkeypatch):
    config = scheduled(f"schedule=lockstep_zb remat_policy={policy} num_repeats=2")
    program_stores = stores(config, monkeypatch)
    unit = [
        jax.ShapeDtypeStruct(store.shape[1:], store.dtype) for store in program_stores.carry.stash
    ]
    per_token = num_bytes(unit) / (program_stores.microbatch_rows * T) / 4
    assert saving_of(config).stash * config.pipeline.num_layers_per_stage == pytest.approx(
        per_token, rel=unknown, abs=0
    )


STAGES, LONG, ROWS, DATA = 4, 64, 2, 2  # ROWS of a microbatch on each of DATA shards
ADDED = 24  # microbatches
TOKEN_ARRAYS = ADDED * ROWS * LONG * 4 * 5  # tokens, targets, positions, segment ids, weights
ROW_NUMBERS = ADDED * ROWS * 4
# The plan of a tick: at most 17 numbers.
TICKS = 17 * 4 * ADDED * 2


def temp_bytes(num_microbatches, words):
    """Temporary memory of one device, for batches that grow with the number of microbatches."""
    config = scheduled(
        f"stage={STAGES} fsdp={DATA} num_repeats=2 num_microbatches={num_microbatches} "
        f"global_batch_size={ROWS * DATA * num_microbatches} sequence_length={LONG} {words}"
    )
    parts = build_engine_inputs(config, make_mesh(config))
    pipeline = build_engine(config, parts)
    arguments = abstract_arguments(config, pipeline, parts)
    compiled = jax.jit(pipeline.loss_and_gradients).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


FURTHER = (
    "schedule=lockstep_zb remat_policy=minimal",
    "skip_idle=false overlap_slots=true",
    "delay_activation_forwarding=true fsdp_gather=once",
    "remat_policy=none scan_layers_per_stage=true",
)


@pytest.mark.parametrize(
    "words", ["", *(pytest.param(words, marks=pytest.mark.slow) for words in FURTHER)]
)
def test_temp_memory_of_the_scheduled_engine_is_flat_in_the_number_of_microbatches(words):
    """From 8 to 32 microbatches of equal size it grows by a few numbers per row and tick.

    With delayed forwarding XLA copies the token arrays into another layout.
    """
    copied = TOKEN_ARRAYS if "delay_activation_forwarding" in words else 0
    growth = temp_bytes(8 + ADDED, words) - temp_bytes(8, words)
    assert growth <= copied + ROW_NUMBERS + TICKS
