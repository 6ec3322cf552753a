"""Test that the generated tables are up to date and agree with the catalogue."""

import subprocess
import sys

from helpers.scripts import SCRIPTS, load_script

from maxpipe.config.options import OPTIONS

generate_docs = load_script("generate_docs")


def test_generate_docs_check_passes_for_the_committed_pages():
    """Run the script by itself, since test helpers add entries to this process's catalogue."""
    script = SCRIPTS / "generate_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run: python scripts/generate_docs.py\n{done.stdout}{done.stderr}"


def test_option_tables_have_a_row_for_every_key():
    text = generate_docs.option_tables()
    assert [key for key in OPTIONS if f"| `{key}` |" not in text] == []


def test_column_of_engines_is_that_of_the_catalogue():
    assert generate_docs.engines_of("pipeline.overlap_slots") == "scheduled"
    assert generate_docs.engines_of("pipeline.num_microbatches") == "all"
    assert generate_docs.engines_of("steps") == ""


def test_engines_of_a_key_names_the_choices_that_some_of_them_refuse():
    policies = "all; scheduled without `minimal_offloaded`, `qkv_proj_offloaded`"
    assert generate_docs.engines_of("pipeline.remat_policy") == policies
    tensor = generate_docs.engines_of("pipeline.remat_tensors.context")
    assert tensor == "all; scheduled without `offload`"
