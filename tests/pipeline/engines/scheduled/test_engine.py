"""The scheduled engine besides its grid of options: tables from files, sharding rules."""

import math

import pytest
from helpers.engines import assert_equals_one_device, make_mesh, tiny

from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.engines.scheduled.sharding import skips_idle
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule


def small(words="", **values):
    common = "schedule=lockstep_1f1b stage=2 num_repeats=2 num_microbatches=6 fsdp=2 "
    return tiny(f"engine=scheduled global_batch_size=24 {common} {words}", **values)


def check(config):
    assert_equals_one_device(config, idle_fill=math.nan)


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
        {"outer_embed": ["data", "fsdp"], "embed": ["data", "fsdp"]},
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
    changed = [rule for rule in DEFAULT_RULES if rule[0] not in rules]
    changed += [[name, axes] for name, axes in rules.items()]
    words = "data=2 fsdp_gather=once" if "data" in str(rules) else "tensor=2"
    check(small(words, **{"sharding.logical_axis_rules": changed}))


def test_skips_idle_on_auto_is_true_on_cpu_without_automatic_axes():
    def decision(words=""):
        config = small(words)
        return skips_idle(config.pipeline, make_mesh(config))

    assert decision()
    assert not decision("tensor=2")
    assert decision("tensor=2 skip_idle=true")
    assert not decision("skip_idle=false")
