"""Test that the generated tables are up to date and agree with the rules about engines."""

import importlib.util
from pathlib import Path

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.config.load import load, resolve
from maxpipe.config.options import OPTIONS
from maxpipe.config.printing import notes

REPOSITORY = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location(
    "generate_docs", REPOSITORY / "scripts" / "generate_docs.py"
)
generate_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate_docs)

ENGINES = {
    "sequential": ["mesh.ici.stage=1", "mesh.ici.fsdp=4"],
    "circular": ["pipeline.schedule=circular"],
    "scheduled": ["pipeline.schedule=lockstep_1f1b"],
    "mpmd": ["pipeline.schedule=interleaved_1f1b"],
}
# A value other than the default for each key, with the keys that it needs.
VALUES = {
    "num_microbatches": ["pipeline.num_microbatches=4"],
    "num_repeats": ["pipeline.num_repeats=1"],
    "num_layers_per_stage": ["pipeline.num_layers_per_stage=1"],
    "layers_per_stage": ["pipeline.layers_per_stage=[1,1,1,1]"],
    "memory_limit_gib": ["pipeline.memory_limit_gib=8"],
    "parallel_layers": [
        "pipeline.parallel_layers=2",
        "pipeline.num_repeats=1",
        "pipeline.num_layers_per_stage=1",
    ],
    "outside_layers": [
        "pipeline.outside_layers=before",
        "pipeline.parallel_layers=2",
        "pipeline.num_repeats=1",
    ],
    "delay_activation_forwarding": ["pipeline.delay_activation_forwarding=true"],
    "overlap_slots": ["pipeline.overlap_slots=true"],
    "skip_idle": ["pipeline.skip_idle=true"],
    "fsdp_gather": ["pipeline.fsdp_gather=once"],
    "scan_iterations": ["pipeline.scan_iterations=false"],
    "scan_repeats": ["pipeline.scan_repeats=false", "pipeline.fsdp_gather=once"],
    "scan_layers_per_stage": ["pipeline.scan_layers_per_stage=true"],
    "remat_policy": ["pipeline.remat_policy=minimal"],
    "remat_iterations": ["pipeline.remat_iterations=false"],
    "remat_layers": ["pipeline.remat_layers=true"],
    "remat_tensors": ["pipeline.remat_policy=custom", "pipeline.remat_tensors.context=device"],
}
# The engine reads the key, but refuses or ignores the value above.
SOME_VALUES_ONLY = {("fsdp_gather", "mpmd"), ("memory_limit_gib", "mpmd")}
CASES = [
    (key, engine) for key in VALUES for engine in ENGINES if (key, engine) not in SOME_VALUES_ONLY
]


def is_read(key, engine):
    """Return whether an engine accepts the value of a key and uses it."""
    try:
        loaded = load(str(REPOSITORY / "configs" / "base.yml"), [*ENGINES[engine], *VALUES[key]])
        resolved = resolve(loaded, 4)
    except ConfigError as error:
        refused = {problem.key.partition(".")[0] for problem in error.problems}
        return refused != {"pipeline"}
    ignored = [line for line in notes(resolved, loaded) if "no effect" in line]
    return not any(f"pipeline.{key}" in line for line in ignored)


def test_generate_docs_check_passes_for_the_committed_pages():
    assert generate_docs.main(["--check"]) == 0, "run: python scripts/generate_docs.py"


def test_option_tables_have_a_row_for_every_key():
    text = generate_docs.option_tables()
    assert [key for key in OPTIONS if f"| `{key}` |" not in text] == []


def test_engines_are_listed_for_every_pipeline_key():
    names = {key.split(".")[1] for key in OPTIONS if key.startswith("pipeline.")}
    assert set(generate_docs.ENGINES) == names
    assert set(VALUES) == names - {"engine", "schedule"}


@pytest.mark.parametrize(("key", "engine"), CASES)
def test_engines_column_of_a_key_agrees_with_the_rules(key, engine):
    assert is_read(key, engine) == (engine in generate_docs.ENGINES[key])
