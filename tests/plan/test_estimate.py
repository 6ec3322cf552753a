"""Memory from shapes: what grows with what, and agreement with the sharded state."""

import jax
import pytest
from helpers.programs import shard_bytes

from maxpipe.builder import build_trainer
from maxpipe.compile.step import compile_step, memory_of
from maxpipe.config import Config, replace, resolve
from maxpipe.config.catalog import NAMED
from maxpipe.config.terminal import ignore_note
from maxpipe.devices.mesh import build_mesh
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.plan.estimate import estimate, traffic
from maxpipe.plan.footprint import itemsize, layer_of, on_platform
from maxpipe.plan.layer_costs import saving_of
from maxpipe.plan.search.block import sizes_of_configuration
from maxpipe.plan.search.memory import Memory

ONE_REPEAT = {"pipeline.num_repeats": 1}
PIPELINE = {"mesh.ici.stage": 4, "mesh.ici.fsdp": 2, "pipeline.num_repeats": 2, "eval.every": 0}


def config_of(**values):
    return resolve(replace(Config(), **(PIPELINE | values)), 8)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("lockstep_1f1b", {}),
        ("circular", {"model.lora.rank": 8}),
        ("circular", {"optimizer.moment_dtype": "bfloat16"}),
        # A row of two layers on each of four stages, and one more for three outside.
        ("circular", {"model.num_layers": 11, "pipeline.parallel_layers": 8} | ONE_REPEAT),
        # A row of one layer, and three more for nine outside.
        ("lockstep_1f1b", {"model.num_layers": 13, "pipeline.parallel_layers": 4} | ONE_REPEAT),
        # All stages have room for the largest chunk.
        ("lockstep_1f1b", {"pipeline.layers_per_stage": [3, 1, 1, 3]} | ONE_REPEAT),
    ],
)
def test_parameters_and_optimizer_are_those_of_the_sharded_state(schedule, values):
    config = config_of(**{"pipeline.schedule": schedule}, **values)
    state = build_trainer(config, build_mesh(config, jax.devices())).abstract_state()
    memory = estimate(config, None)
    # Norms are not sharded, and the optimizer counts its steps.
    assert memory.parameters == pytest.approx(shard_bytes(state.params), rel=0.01)
    assert memory.optimizer == pytest.approx(shard_bytes(state.opt_state), rel=0.01)


def test_memory_with_layers_outside_a_lockstep_pipeline_is_that_of_the_compiler():
    """Weights take most of it; in a loop the compiler does not gather layers ahead."""
    sizes = {"embed_dim": 256, "num_query_heads": 4, "num_kv_heads": 4, "mlp_dim": 1024}
    values = {f"model.{key}": size for key, size in (sizes | {"vocab_size": 512}).items()}
    values |= {"model.num_layers": 5, "pipeline.parallel_layers": 4, "pipeline.num_repeats": 1}
    values |= {"pipeline.schedule": "lockstep_1f1b", "pipeline.num_microbatches": 4}
    values |= {"pipeline.fsdp_gather": "once", "pipeline.remat_policy": "full"}
    values |= {"pipeline.scan_layers_per_stage": True, "data.sequence_length": 16}
    config = config_of(**values, **{"data.global_batch_size": 8})
    mesh = build_mesh(config, jax.devices())
    step = compile_step(config, mesh, build_trainer(config, mesh), ignore_note)
    assert estimate(config, None).total == pytest.approx(
        memory_of(step.executable, mesh).total, rel=0.1
    )


def test_a_table_from_a_file_is_estimated_as_the_schedule_of_a_name(tmp_path):
    for schedule, splits in (("lockstep_1f1b", False), ("lockstep_zb", True)):
        values = {"pipeline.remat_policy": "minimal", "pipeline.num_microbatches": 8}
        named = config_of(**values, **{"pipeline.schedule": schedule})
        path = tmp_path / "own.csv"
        path.write_text(to_csv(build_table(named)))
        config = config_of(**values, **{"pipeline.schedule": str(path)})
        assert estimate(config, None) == estimate(named, None), schedule
        sizes = sizes_of_configuration(config, None, on_tpus=False)
        assert sizes.splits_backward is splits


def test_layers_that_apply_minimal_to_themselves_save_what_their_own_backward_reads():
    """The input of the next layer, which it saves itself, is made of the last product's result."""
    for model, unread in (
        ({}, 32),
        ({"model.norm_placement": "sandwich"}, 0),
        ({"model.moe.experts": 4, "model.moe.mlp_dim": 16}, 32),
        ({"model.moe.experts": 4, "model.moe.mlp_dim": 16, "model.mlp_bias": True}, 0),
    ):
        values = {"pipeline.remat_policy": "minimal", "model.embed_dim": 32} | model
        by_layer = {"pipeline.remat_iterations": False, "pipeline.remat_layers": True}
        sequential = {"pipeline.engine": "sequential", "mesh.ici.stage": 1, "mesh.ici.fsdp": 8}
        config = config_of(**values, **sequential)
        choice = 2 if "model.moe.experts" in model else 0  # experts of a token, an integer each
        named = layer_of(config).saved_width(NAMED)
        kept = saving_of(config).residuals
        assert kept == pytest.approx(named - unread, abs=choice), model
        circular = {"pipeline.engine": "circular", "pipeline.schedule": "circular"}
        staged = config_of(**values, **circular, **by_layer)
        # With the layer's input, which is not counted by itself there.
        assert saving_of(staged).residuals == pytest.approx(32 + named - unread, abs=choice)


@pytest.mark.parametrize(
    ("policy", "mesh", "compiled"),
    [
        ("none", {"fsdp": 8}, (8.0, 6.15)),
        ("none", {"fsdp": 4, "tensor": 2}, (7.3, 6.5)),
        ("minimal", {"fsdp": 8}, (5.97, 6.15)),
    ],
)
def test_unrolled_layers_keep_what_the_compiler_does_not_make_again(policy, mesh, compiled):
    """Where nothing must be made again, the compiler keeps all results of products.

    Compiled are the GiB of a device of v5p:2x2x2 without parameters and the optimizer's state, of
    unrolled layers and of a loop.
    """
    sizes = {"embed_dim": 3072, "num_query_heads": 24, "num_kv_heads": 8, "head_dim": 128}
    sizes |= {"mlp_dim": 8192, "vocab_size": 32768, "num_layers": 8, "dtype": "bfloat16"}
    values = {f"model.{key}": value for key, value in sizes.items()}
    values |= {f"mesh.ici.{axis}": size for axis, size in ({"stage": 1} | mesh).items()}
    values |= {"pipeline.engine": "sequential", "pipeline.remat_policy": policy}
    values |= {"pipeline.num_repeats": 1, "pipeline.num_microbatches": 1}
    values |= {"data.sequence_length": 2048, "data.global_batch_size": 32}

    def working(scans):
        memory = estimate(config_of(**values, **{"pipeline.scan_layers": scans}), 95e9)
        return (memory.total - memory.parameters - memory.optimizer) / 2**30

    unrolled, looped = working(False), working(True)
    assert (unrolled, looped) == pytest.approx(compiled, rel=0.2)
    # A loop has room for all gradients from its start, and copies what a layer kept.
    if policy == "minimal":
        assert unrolled < looped


def test_traffic_of_weights_counts_products_that_nothing_spares():
    """An embedding that is no projection as well is looked up, not multiplied with."""
    config = config_of()
    size = config.model.vocab_size
    of_head = config.model.embed_dim * size / config.mesh.size("stage")

    def moved(vocabulary, **values):
        config = config_of(**{"model.vocab_size": vocabulary}, **values)
        return traffic(config, Memory(0.0, 0.0, 0.0, 0.0, 0.0)) / config.pipeline.num_microbatches

    for policy, passes in (("full", 4), ("minimal", 3), ("none", 3)):
        for tied in (False, True):
            values = {"pipeline.remat_policy": policy, "model.tie_embeddings": tied}
            added = moved(2 * size, **values) - moved(size, **values)
            expected = passes * itemsize(config.model.dtype) * of_head
            assert added == pytest.approx(expected), values


def test_experts_over_devices_are_priced_with_rows_for_every_choice():
    moe = {"experts": 8, "per_token": 2, "mlp_dim": 64}
    values = {"mesh.ici.stage": 1, "pipeline.engine": "sequential"}
    values |= {f"model.moe.{key}": value for key, value in moe.items()}

    def priced(axis):
        return estimate(resolve(replace(Config(), **values | {f"mesh.ici.{axis}": 4}), 4), None)

    whole, shared = priced("data"), priced("expert")
    model = replace(Config(), **values).model
    of_experts = model.num_layers * 8 * 3 * model.embed_dim * 64
    assert whole.parameters - shared.parameters == 4.0 * of_experts * 3 / 4
    assert whole.gradients - shared.gradients == 4.0 * of_experts * 3 / 4
    # Four devices' tokens, of which all may choose the two experts of one.
    assert shared.activations > 1.5 * whole.activations


@pytest.mark.parametrize("policy", ["full", "none"])
def test_scores_that_a_kernel_holds_are_those_of_the_compiled_step(policy):
    """Eight heads of 512 tokens make scores the most of it; simulated devices hold all of them."""
    values = {"embed_dim": 64, "num_query_heads": 8, "num_kv_heads": 8, "num_layers": 3}
    values |= {"mlp_dim": 128, "vocab_size": 256, "head_dim": 16, "dtype": "float32"}
    values = {f"model.{key}": value for key, value in values.items()}
    values |= {"mesh.ici.data": 2, "pipeline.engine": "sequential", "eval.every": 0}
    values |= {"pipeline.num_microbatches": 1, "pipeline.remat_policy": policy}
    values |= {"data.sequence_length": 512, "data.global_batch_size": 8}
    config = resolve(replace(Config(), **values), 2)
    mesh = build_mesh(config, jax.devices()[:2])
    step = compile_step(config, mesh, build_trainer(config, mesh), ignore_note)
    compiled = memory_of(step.executable, mesh).total
    assert estimate(on_platform(config, "cpu"), None).total == pytest.approx(compiled, rel=0.25)
    assert estimate(config, None).total < 0.3 * compiled  # as of a kernel that holds none
