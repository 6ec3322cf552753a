"""The scheduled engine besides its grid of options: evaluation, files, dtypes, sharding rules."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from helpers.engines import EngineUnderTest, assert_same, make_batch, make_mesh, reference, tiny

from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.engines.scheduled.sharding import skips_idle
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule

NAN = math.nan


def small(**values):
    """Two stages of two repeats with two-way FSDP, 24 rows in six microbatches."""
    return tiny(
        **{
            "pipeline.engine": "scheduled",
            "pipeline.schedule": "lockstep_1f1b",
            "pipeline.num_repeats": 2,
            "pipeline.num_microbatches": 6,
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
            "data.global_batch_size": 24,
        }
        | values
    )


def sequential_like(config):
    """The same model and batch on one device."""
    plain = tiny(
        **{"pipeline.engine": "sequential", "data.global_batch_size": config.data.global_batch_size}
    )
    return dataclasses.replace(plain, model=config.model)


def check(config):
    rows = config.data.global_batch_size
    actual = EngineUnderTest(config, idle_fill=NAN).train(make_batch(rows))
    assert_same(actual, reference(config.model, rows))


@pytest.mark.parametrize("rows", [24, 8, 72, 10])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pipeline.delay_activation_forwarding": True, "pipeline.skip_idle": "false"},
        {
            "pipeline.layers_per_stage": [1, 3, 1, 2],
            "model.num_layers": 7,
            "pipeline.fsdp_gather": "once",
        },
    ],
    ids=["plain", "delay", "uneven"],
)
def test_evaluate_of_any_batch_size_is_exact(values, rows):
    """As large as the training batch, smaller, larger, and not divisible by the microbatches."""
    config, batch = small(**values), make_batch(rows, seed=1)
    expected = EngineUnderTest(sequential_like(config)).evaluate(batch)
    assert EngineUnderTest(config, idle_fill=NAN).evaluate(batch) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("S", "V", "M", "delay"),
    [
        (4, 1, 1, False),
        (4, 2, 9, False),
        (2, 2, 5, True),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in (
                (2, 2, 1, False),
                (2, 2, 5, False),
                (4, 2, 3, False),
                (2, 2, 1, True),
                (4, 1, 7, True),
                (4, 2, 13, True),
            )
        ),
    ],
)
def test_gradients_of_any_number_of_microbatches_are_exact(S, V, M, delay):
    """Fewer than stages, and groups of different sizes."""
    values = {
        "mesh.ici.stage": S,
        "mesh.ici.fsdp": 1,
        "pipeline.num_repeats": V,
        "pipeline.num_microbatches": M,
        "pipeline.delay_activation_forwarding": delay,
        "model.num_layers": S * V,
        "data.global_batch_size": 2 * M,
    }
    check(small(**values))


@pytest.mark.parametrize("delay", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_of_lockstep_1f1b_from_a_file_are_exact(delay, tmp_path):
    table = load_schedule("lockstep_1f1b", 2, 6, 2, forwarding_delay=delay, slack=1)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(table))
    check(
        small(
            **{
                "pipeline.schedule": str(path),
                "pipeline.delay_activation_forwarding": delay == 2,
                "pipeline.overlap_slots": True,
            }
        )
    )


def test_gradients_of_a_free_running_table_are_exact(tmp_path):
    """Every tick has one unit, with idle ticks in between; all F precede all B, as in GPipe."""
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(load_schedule("gpipe", 2, 6, 1)))
    check(small(**{"pipeline.schedule": str(path), "pipeline.num_repeats": 1}))


@pytest.mark.slow
def test_gradients_of_a_free_running_table_with_split_backwards_are_exact(tmp_path):
    """W has a tick of its own, on every stage another number of ticks after its I."""
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(load_schedule("zb_h1", 2, 6, 1)))
    check(
        small(
            **{
                "pipeline.schedule": str(path),
                "pipeline.num_repeats": 1,
                "pipeline.remat_policy": "minimal",
                "mesh.ici.fsdp": 1,
            }
        )
    )


@pytest.mark.slow
def test_gradients_of_a_table_with_holes_are_exact(tmp_path):
    """Microbatches out of order, holes, and one backward before the other's forward."""
    path = tmp_path / "schedule.csv"
    path.write_text("0F1,,0F0,,,,,0B1,,,,0B0\n,,1F1,,,1B1,1F0,,,1B0\n")
    values = {
        "pipeline.schedule": str(path),
        "pipeline.num_repeats": 1,
        "pipeline.num_microbatches": 2,
    }
    check(small(**values))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"model.tie_embeddings": True}, marks=pytest.mark.slow),
        {
            "mesh.ici.fsdp": 1,
            "mesh.ici.data": 2,
            "pipeline.num_layers_per_stage": 1,
            "pipeline.parallel_layers": 4,
        },
        pytest.param(
            {"pipeline.fsdp_gather": "once", "pipeline.remat_policy": "none"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "pipeline.delay_activation_forwarding": True,
                "pipeline.remat_policy": "minimal",
                "mesh.ici.data": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tied", "whole", "once", "delay"],
)
def test_gradients_in_bfloat16_are_close(values):
    """Gradients to the sequential engine's in bfloat16, the loss to that of float32."""
    config, batch = small(**{"model.dtype": "bfloat16"} | values), make_batch(24)
    actual = EngineUnderTest(config, idle_fill=NAN).train(batch)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(actual.gradients))
    assert_same(actual, reference(config.model, 24), tolerance=3e-2)
    exact = reference(dataclasses.replace(config.model, dtype="float32"), 24)
    assert actual.loss == pytest.approx(exact.loss, rel=3e-3)


def test_gradients_of_bfloat16_parameters_over_tensor_are_close():
    values = {"model.dtype": "bfloat16", "model.param_dtype": "bfloat16", "mesh.ici.tensor": 2}
    config = small(**values)
    actual = EngineUnderTest(config).train(make_batch(24))
    assert_same(actual, reference(config.model, 24), tolerance=3e-2)


def test_loss_with_a_microbatch_of_weight_zero_is_divided_by_the_global_weight():
    """No mean of microbatch means."""
    batch = make_batch(24)
    batch["weights"][1::6] = 0
    expected = EngineUnderTest(sequential_like(small())).train(batch)
    assert_same(EngineUnderTest(small()).train(batch), expected)


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param([["outer_embed", []]], marks=pytest.mark.slow),
        [["outer_embed", ["fsdp", "stage"]]],
        [["outer_embed", ["data", "fsdp"]], ["embed", ["data", "fsdp"]]],
        [["embed", ["tensor"]], ["mlp", ["fsdp"]], ["heads", ["data"]], ["kv_heads", []]],
        [["norm", ["fsdp"]], ["head_dim", ["tensor"]], ["heads", []], ["kv_heads", []]],
    ],
    ids=str,
)
def test_gradients_under_other_sharding_rules_are_exact(rules):
    gather = "once" if "data" in str(rules) else "per_iteration"
    changed = [rule for rule in DEFAULT_RULES if rule[0] not in {name for name, _ in rules}] + rules
    axes = {"mesh.ici.data": 2} if "data" in str(rules) else {"mesh.ici.tensor": 2}
    check(small(**{"sharding.logical_axis_rules": changed, "pipeline.fsdp_gather": gather} | axes))


@pytest.mark.parametrize("embed", [20, pytest.param(18, marks=pytest.mark.slow)])
def test_gradients_of_an_embedding_that_devices_do_not_divide_are_exact(embed):
    """Of 4 stages and 2-way fsdp, stage divides 20 columns and fsdp 18; tokens do not divide."""
    values = {
        "model.embed_dim": embed,
        "model.head_dim": 4,
        "model.vocab_size": 67,
        "mesh.ici.stage": 4,
        "pipeline.num_repeats": 1,
        "pipeline.num_microbatches": 12,
    }
    config = small(**values)
    check(config)


def test_skips_idle_on_auto_is_true_on_cpu_without_automatic_axes():
    def decision(**values):
        config = small(**values)
        return skips_idle(config.pipeline, make_mesh(config))

    assert decision()
    assert not decision(**{"mesh.ici.tensor": 2})
    assert decision(**{"mesh.ici.tensor": 2, "pipeline.skip_idle": "true"})
    assert not decision(**{"pipeline.skip_idle": "false"})
