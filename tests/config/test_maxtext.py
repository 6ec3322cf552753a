"""The migration table of docs/maxtext.md is the one that error messages use."""

import sys
from pathlib import Path

import pytest

from maxpipe.config import maxtext
from maxpipe.config.maxtext import KEYS, table, with_table

PAGE = Path(__file__).parents[2] / "docs" / "maxtext.md"


def test_page_has_the_table():
    text = PAGE.read_text()
    assert with_table(text) == text, "run: python scripts/generate_docs.py"


def test_command_prints_the_table(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["maxtext"])
    maxtext.main()
    assert capsys.readouterr().out == table() + "\n"


def test_keys_of_maxtexts_pipeline_have_counterparts():
    names = """ici_pipeline_parallelism dcn_pipeline_parallelism num_layers_per_pipeline_stage
    num_pipeline_repeats pipeline_parallel_layers num_pipeline_microbatches
    pipeline_delay_activation_forwarding pipeline_fsdp_ag_once pipeline_fsdp_ag_per_repeat
    scan_pipeline_iterations scan_pipeline_repeats set_remat_policy_on_pipeline_iterations
    set_remat_policy_on_layers_per_stage remat_policy"""
    assert [key for key in names.split() if not KEYS.get(key, ("",))[0]] == []


def test_with_table_without_marks_is_refused():
    with pytest.raises(ValueError, match="marks"):
        with_table("# A text\n")


def test_with_table_keeps_the_text_around_it():
    before, after = "above\n<!-- MaxText keys: start -->\n", "<!-- MaxText keys: end -->\nbelow\n"
    assert with_table(f"{before}old\n{after}") == f"{before}{table()}\n{after}"
