"""A user's variants outside the checkout, by `--import` and by an entry point."""

import os
import re
import subprocess
import sys

import pytest
from helpers.documentation import REPOSITORY, titled_files
from helpers.training_process import TINY_MODEL

TINY = (
    "base",
    "steps=2",
    "eval.every=0",
    "model.num_layers=2",
    *TINY_MODEL,
    "mesh.simulated_devices=2",
    "mesh.ici.fsdp=1",
    "pipeline.num_repeats=1",
)
VARIANTS = (
    "model.block=parallel",
    "data.source=counting",
    "data.tokenizer=characters",
    "optimizer.name=sign_sgd",
    "optimizer.schedule=halves",
    "pipeline.remat_policy=save_context",
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return a directory with the examples of docs/extending.md and a run that used them."""
    directory = tmp_path_factory.mktemp("mine")
    for name, text in titled_files("docs/extending.md").items():
        (directory / name).write_text(text, encoding="utf-8")
    done = run(
        directory,
        "train",
        "--import",
        "my_catalog",
        *TINY,
        *VARIANTS,
        "pipeline.schedule=patient_1f1b",
        "checkpoint.every=2",
    )
    assert done.returncode == 0, done.stderr
    return directory


def run(directory, command, *words, path=()):
    """Run a command in a directory, which Python does not search by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *path])}
    return subprocess.run(
        [sys.executable, "-P", "-m", "maxpipe", command, *map(str, words)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("command", "words", "shown"),
    [
        ("schedule", ("patient_1f1b", "stages=2", "microbatches=4"), "patient_1f1b: 2 stages"),
        ("train", ("--help", "pipeline.schedule"), "patient_1f1b"),
        ("generate", ("runs/base", "--prompt", "1 2", "--max-tokens", "3"), "1 2"),
        (
            "compile",
            (*TINY, *VARIANTS, "compile.topology=cpu"),
            "verdict",
        ),
    ],
)
def test_import_adds_variants_to_every_command(package, command, words, shown):
    done = run(package, command, "--import", "my_catalog", *words)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_import_adds_variants_to_the_data_command(package):
    done = run(
        package, "data", "show", "--import", "my_catalog", *TINY, *VARIANTS, "--seconds=0.01"
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"segment 1, tokens 0-\d+: '[\d ]+'", done.stdout), done.stdout


def test_import_adds_variants_to_each_process_that_encodes(package):
    for name in "ab":
        (package / f"{name}.txt").write_text("a line\n" * (6 << 17))
    flags = ("--import=my_catalog", "--tokenizer=characters", "--out=encoded", "--workers=2")
    done = run(package, "tokenize", "encode", "a.txt", "b.txt", *flags)
    assert done.returncode == 0, done.stderr
    assert "2 of 2: part-" in done.stdout
    assert "wrote encoded: 2 documents" in done.stdout


def test_without_the_import_the_message_names_the_flag(package):
    for words in (("generate", "runs/base", "--prompt", "1"), ("train", *TINY, VARIANTS[0])):
        done = run(package, *words)
        assert done.returncode == 2
        assert "--import MODULE" in done.stderr


def test_an_entry_point_adds_variants_without_a_flag(package):
    info = package / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[maxpipe.variants]\nmine = my_catalog\n")
    words = ("schedule", "patient_1f1b", "stages=2", "microbatches=4")
    done = run(package, *words, path=[str(package)])
    assert (done.returncode, done.stderr) == (0, "")
    (info / "entry_points.txt").write_text("[maxpipe.variants]\nmine = missing_module\n")
    broken = run(package, "schedule", "1f1b", path=[str(package)])
    assert broken.returncode == 0
    assert "the variants of my_package are missing: ModuleNotFoundError" in broken.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot import broken: ModuleNotFoundError: No module named 'broken'"),
        ("1 / 0", "ZeroDivisionError: division by zero ("),
        ("def x(:", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_ends_with_2_and_the_reason(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "broken.py").write_text(text)
    done = run(tmp_path, "train", "--import", "broken", *TINY)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert text != "1 / 0" or "broken.py:1)" in done.stderr


def test_an_implementation_that_does_not_exist_is_a_config_error(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from maxpipe.config import catalog\n"
        "catalog.BLOCKS['mine'] = catalog.Block('mine:Missing')\n"
    )
    done = run(tmp_path, "train", "--import", "mine", *TINY, "model.block=mine")
    assert done.returncode == 2
    assert "cannot import mine:Missing, which the catalogue names" in done.stderr
