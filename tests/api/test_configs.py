"""`import maxpipe` is light and says where to begin; `load_config` is that of the command."""

import pydoc
import subprocess
import sys

import pytest

import maxpipe
from maxpipe.config import load
from maxpipe.config.shipped import config_root


def test_load_config_by_name_and_by_path_is_that_of_the_command():
    words = ["model.num_layers=8", "steps=7"]
    config = maxpipe.load_config("base", *words)
    assert config == load("configs/base.yml", words).config
    assert config == maxpipe.load_config(config_root() / "base.yml", *words)
    assert (config.model.num_layers, config.steps, config.run_name) == (8, 7, "base")


def test_load_config_names_all_problems_in_one_value_error():
    with pytest.raises(maxpipe.ConfigError) as caught:
        maxpipe.load_config("base", "model.num_layer=8", "steps=0")
    assert isinstance(caught.value, ValueError)
    first, second = str(caught.value).splitlines()
    assert "did you mean model.num_layers" in first
    assert second.startswith("steps")


def test_load_config_of_an_unknown_name_lists_the_shipped_ones():
    with pytest.raises(ValueError, match="did you mean llama3-8b"):
        maxpipe.load_config("lama3-8b")


def test_import_loads_no_jax_and_neither_do_configs_and_schedules():
    program = """
import sys
import maxpipe
maxpipe.load_config("base")
maxpipe.schedule("lockstep_1f1b", stages=2, microbatches=2)._repr_html_()
assert "jax" not in sys.modules and "flax" not in sys.modules
from maxpipe import Run, load_model
assert "jax" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_says_where_to_begin_and_names_what_there_is():
    text = pydoc.plain(pydoc.render_doc(maxpipe))
    beginning = text[: text.index("PACKAGE CONTENTS")]
    for name in ("load_config(", "Run(", "load_model(", "schedule(", "maxpipe.train base"):
        assert name in beginning
    assert "class Run(" in text
    assert "load_config(config: " in text


@pytest.mark.parametrize("name", maxpipe.__all__)
def test_public_names_exist_and_are_documented(name):
    assert getattr(maxpipe, name).__doc__
    assert name in dir(maxpipe)


def test_unknown_attribute_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = maxpipe.nothing
