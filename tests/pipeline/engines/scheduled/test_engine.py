"""The scheduled engine besides its grid of options: tables from files, sharding rules, stores."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import assert_equals_one_device, make_mesh, tiny

from maxpipe.builder import build_engine_inputs
from maxpipe.config import ConfigError
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.engines.scheduled.carry import filled
from maxpipe.pipeline.engines.scheduled.engine import ScheduledEngine
from maxpipe.pipeline.engines.scheduled.sharding import skips_idle
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule


def small(words="", **values):
    common = "schedule=lockstep_1f1b stage=2 num_repeats=2 num_microbatches=6 fsdp=2 "
    return tiny(f"engine=scheduled global_batch_size=24 {common} {words}", **values)


def check(config):
    assert_equals_one_device(config, idle_fill=math.nan)


def with_rules(rules):
    changed = [rule for rule in DEFAULT_RULES if rule[0] not in rules]
    return {"sharding.logical_axis_rules": changed + [[*rule] for rule in rules.items()]}


# Microbatches out of order, holes, and one backward before the other's forward.
HOLES = "0F1,,0F0,,,,,0B1,,,,0B0\n,,1F1,,,1B1,1F0,,,1B0\n"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        # Every tick has one unit, with idle ticks in between; all F precede all B.
        (("gpipe", 2, 6), "num_repeats=1"),
        pytest.param(
            ("lockstep_1f1b", 2, 6, 2),
            "overlap_slots=true delay_activation_forwarding=true",
            marks=pytest.mark.slow,
        ),
        # W has a tick of its own, on every stage another number of ticks after its I.
        pytest.param(
            ("zb_h1", 2, 6), "num_repeats=1 remat_policy=minimal fsdp=1", marks=pytest.mark.slow
        ),
        pytest.param(HOLES, "num_repeats=1 num_microbatches=2", marks=pytest.mark.slow),
    ],
    ids=["free_running", "delayed", "split_backwards", "holes"],
)
def test_gradients_of_a_table_from_a_file_are_exact(table, words, tmp_path):
    path, options = tmp_path / "schedule.csv", {}
    if "delay" in words:
        options = {"forwarding_delay": 2, "slack": 1}
    path.write_text(table if table is HOLES else to_csv(load_schedule(*table, **options)))
    check(small(words, **{"pipeline.schedule": str(path)}))


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(
            {"outer_embed": ["data", "fsdp"], "embed": ["data", "fsdp"]}, marks=pytest.mark.slow
        ),
        {"norm": ["fsdp"], "head_dim": ["tensor"], "heads": [], "kv_heads": []},
        pytest.param({"outer_embed": []}, marks=pytest.mark.slow),
        pytest.param({"outer_embed": ["fsdp", "stage"]}, marks=pytest.mark.slow),
        pytest.param(
            {
                "embed": ["tensor"],
                "outer_embed": [],
                "mlp": ["fsdp"],
                "heads": ["data"],
                "kv_heads": [],
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_gradients_under_other_sharding_rules_are_exact(rules):
    words = "data=2 fsdp_gather=once" if "data" in str(rules) else "tensor=2"
    check(small(words, **with_rules(rules)))


def test_skips_idle_on_auto_is_true_on_cpu_without_automatic_axes():
    def decision(words=""):
        config = small(words)
        return skips_idle(config.pipeline, make_mesh(config))

    assert decision()
    assert not decision("tensor=2")
    assert decision("tensor=2 skip_idle=true")
    assert not decision("skip_idle=false")


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        (["activation_batch", []], "[activation_batch, [fsdp]]"),
        (["activation_length", ["stage"]], "[activation_length, [context]]"),
        (["stage", []], "[stage, [stage]]"),
        (["repeat", ["fsdp"]], "[repeat, []]"),
        (["layers_per_stage", ["fsdp"]], "[layers_per_stage, []]"),
        (["vocab", ["tensor", "fsdp"]], "from 'vocab' and give them to 'outer_embed'"),
    ],
    ids=str,
)
def test_check_rules_of_another_layout_names_rule_and_remedy(rule, remedy):
    rules = dict([rule, ["outer_embed", []]] if rule[0] == "vocab" else [rule])
    config = small("tensor=2", **with_rules(rules))
    with pytest.raises(ConfigError) as error:
        ScheduledEngine(build_engine_inputs(config, make_mesh(config)))
    assert "sharding.logical_axis_rules" in str(error.value)
    assert remedy in str(error.value)


def test_filled_leaves_floats_as_they_are_on_accelerators_without_a_value():
    def stores(value):
        return filled((2, 3), jnp.float32, value), filled((2,), jnp.int32, value)

    def lowered(value, platform):
        traced = jax.jit(stores, static_argnums=0).trace(value)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    for platform in ("tpu", "cuda"):
        assert lowered(None, platform).count("AllocateBuffer") == 1
        assert "AllocateBuffer" not in lowered(0.0, platform)
    for value in (None, 0.0, np.nan):
        np.testing.assert_array_equal(stores(value)[1], 0)
    assert np.isnan(stores(np.nan)[0]).all()
