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


def test_configs_import_no_heavy_library_and_what_needs_no_devices_no_jax():
    """Such as a schedule by name, and the mistakes of training, a plan and a compilation."""
    program = """
import contextlib, sys
import maxpipe
from maxpipe.config import load, notes, print_config, resolve
from maxpipe.config.printing import describe
from maxpipe.config.options import OPTIONS
[(option.choices, describe(key)) for key, option in OPTIONS.items()]
loaded = load("configs/base.yml", ["seed=${steps}"])
notes(resolve(loaded, 4), loaded), print_config(loaded), maxpipe.load_config("base")
heavy = {"jax", "numpy", "flax", "optax", "orbax", "grain"}
assert not heavy & {*sys.modules}, heavy & {*sys.modules}
maxpipe.schedule("lockstep_1f1b", stages=2, microbatches=2)._repr_html_()
with contextlib.suppress(maxpipe.ConfigError):
    maxpipe.history("none")
from maxpipe import schedule, train
from maxpipe.compile import __main__ as compile
from maxpipe.plan import __main__ as plan
schedule.main(["1f1b"])
words = {train: ["stepz=7"], plan: ["--topology", "v5q:2x2"], compile: ["mesh.ici.fsdp=3"]}
for command, wrong in words.items():
    with contextlib.suppress(SystemExit):
        command.main(["base", *wrong])
assert "numpy" in sys.modules and not {"jax", "flax"} & {*sys.modules}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_says_where_to_begin_and_names_what_there_is():
    text = pydoc.plain(pydoc.render_doc(maxpipe))
    beginning = text[: text.index("PACKAGE CONTENTS")]
    for name in ("load_config(", "Run(", "load_model(", "history(", "schedule(", "maxpipe.train"):
        assert name in beginning
    assert "class Run(" in text
    assert "load_config(config: " in text


def test_public_names_exist_and_are_documented():
    assert [name for name in maxpipe.__all__ if not getattr(maxpipe, name).__doc__] == []
    assert {*maxpipe.__all__} <= {*dir(maxpipe)}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = maxpipe.nothing
