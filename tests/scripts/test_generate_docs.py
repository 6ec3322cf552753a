"""Test that the generated tables are up to date and agree with the catalogue."""

import importlib.util
from pathlib import Path

from maxpipe.config.options import OPTIONS

REPOSITORY = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location(
    "generate_docs", REPOSITORY / "scripts" / "generate_docs.py"
)
generate_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate_docs)


def test_generate_docs_check_passes_for_the_committed_pages():
    assert generate_docs.main(["--check"]) == 0, "run: python scripts/generate_docs.py"


def test_option_tables_have_a_row_for_every_key():
    text = generate_docs.option_tables()
    assert [key for key in OPTIONS if f"| `{key}` |" not in text] == []


def test_column_of_engines_is_that_of_the_catalogue():
    assert generate_docs.engines_of("pipeline.overlap_slots") == "scheduled"
    assert generate_docs.engines_of("pipeline.remat_policy") == "all"
    assert generate_docs.engines_of("steps") == ""
