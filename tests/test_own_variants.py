"""A user's variants outside the checkout, by `--import` and by an entry point."""

import contextlib
import importlib
import os
import re
import subprocess
import sys

import pytest
from helpers.commands import command
from helpers.documentation import REPOSITORY, own_variants_forgotten, titled_files
from helpers.training_process import TINY_MODEL

TINY = (
    *("base", "steps=2", "eval.every=0", "model.num_layers=2", *TINY_MODEL),
    *("mesh.simulated_devices=8", "mesh.ici.fsdp=4"),
    *("pipeline.num_repeats=1", "compile.cache_dir=off"),
)
VARIANTS = (
    "model.block=parallel",
    "data.source=counting",
    "data.tokenizer=characters",
    "optimizer.name=sign_sgd",
    "optimizer.schedule=halves",
    "pipeline.remat_policy=save_context",
)
PATIENT = ("patient_1f1b", "stages=2", "microbatches=4")


def run(directory, name, *words):
    with own_variants_forgotten(), contextlib.chdir(directory):
        return command(name).main([str(word) for word in words])


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mine")
    for name, text in titled_files("docs/extending.md").items():
        (directory / name).write_text(text, encoding="utf-8")
    words = (*TINY, *VARIANTS, "pipeline.schedule=patient_1f1b", "checkpoint.every=2")
    assert run(directory, "train", "--import", "my_catalog", *words) == 0
    return directory


def test_import_adds_variants_to_the_help(package, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(package, "train", "--import", "my_catalog", "--help", "pipeline.schedule")
    assert "patient_1f1b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words", "shown"),
    [
        ("generate", ("runs/base", "--prompt", "1 2", "--max-tokens", "3"), "1 2"),
        ("compile", (*TINY, *VARIANTS, "compile.topology=cpu"), "verdict"),
        ("data.__main__", ("show", *TINY, *VARIANTS, "--seconds=0.01"), "segment 1, tokens 0-"),
    ],
)
def test_import_adds_variants_to_every_command(package, command, words, shown, capfd):
    assert run(package, command, *words, "--import", "my_catalog") == 0
    assert shown in capfd.readouterr().out


def test_import_adds_variants_to_each_process_that_encodes(package, capfd):
    for name in "ab":
        (package / f"{name}.txt").write_text("a line\n" * (6 << 17))
    flags = ("--import=my_catalog", "--tokenizer=characters", "--out=encoded", "--workers=2")
    assert run(package, "tokenize", "encode", "a.txt", "b.txt", *flags) == 0
    printed = capfd.readouterr().out
    assert "2 of 2: part-" in printed
    assert "wrote encoded: 2 documents" in printed


def refusal(directory, capsys, command, *words):
    with pytest.raises(SystemExit, match="2"):
        run(directory, command, *words)
    return capsys.readouterr().err


def test_without_the_import_the_message_names_the_flag(package, capsys):
    for words in (("generate", "runs/base", "--prompt", "1"), ("train", *TINY, VARIANTS[0])):
        assert "--import MODULE" in refusal(package, capsys, *words)


def test_an_entry_point_adds_variants_without_a_flag(package, capsys, monkeypatch):
    info = package / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[maxpipe.variants]\nmine = my_catalog\n")
    monkeypatch.syspath_prepend(package)
    assert run(package, "schedule", *PATIENT) == 0
    assert capsys.readouterr().err == ""
    (info / "entry_points.txt").write_text("[maxpipe.variants]\nmine = missing_module\n")
    assert run(package, "schedule", "1f1b") == 0
    error = "the variants of my_package are missing: ModuleNotFoundError"
    assert error in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_ends_with_2_and_the_reason(tmp_path, capsys):
    missing = "cannot import broken: ModuleNotFoundError: No module named 'broken'"
    assert missing in refusal(tmp_path, capsys, "train", "--import", "broken", *TINY)
    for text, reason in (
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*broken.py:1\)"),
        ("def x(:", "SyntaxError"),
    ):
        (tmp_path / "broken.py").write_text(text)
        importlib.invalidate_caches()
        error = refusal(tmp_path, capsys, "train", "--import", "broken", *TINY)
        assert re.search(reason, error), error


def test_an_implementation_that_does_not_exist_is_a_config_error(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from maxpipe.config import catalog\n"
        "catalog.BLOCKS['mine'] = catalog.Block('mine:Missing')\n"
    )
    words = ("--import", "mine", *TINY, "model.block=mine")
    error = refusal(tmp_path, capsys, "train", *words)
    assert "cannot import mine:Missing, which the catalogue names" in error


def test_a_process_looks_for_modules_in_its_working_directory(package):
    words = ["-P", "-m", "maxpipe", "schedule", "--import", "my_catalog", *PATIENT]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words], cwd=package, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, "patient_1f1b: 2 stages" in done.stdout) == (0, True), done.stderr
