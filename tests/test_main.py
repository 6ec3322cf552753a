"""`maxpipe COMMAND`: every command under one name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import command

import maxpipe
from maxpipe.__main__ import COMMANDS, main


def run(*words):
    command = [sys.executable, "-m", "maxpipe", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_main_help_of_a_command_names_the_command(command):
    result = run(command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"python -m maxpipe.{command}" in result.stdout


def test_main_config_error_ends_with_2_as_the_module_does():
    result = run("train", "nowhere.yml")
    assert result.returncode == 2
    assert "config error: there is no file nowhere.yml" in result.stderr


def test_main_without_words_lists_the_commands(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_main_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"maxpipe {maxpipe.__version__}\n"


def test_main_unknown_command_ends_with_2_and_lists_the_commands(capsys):
    assert main(["trian"]) == 2
    shown = capsys.readouterr().err
    assert "there is no command 'trian'; did you mean train?" in shown
    assert "train" in shown


@pytest.mark.parametrize(
    "words",
    [
        "compile base compile.topology=cpu --units",
        "compile base compile.topology=cpu --profile-trace",
        "compile base compile.topology=cpu --json",
        "plan base --topology",
        "schedule gpipe --csv",
        "evaluate runs/base --tasks a --json",
        "export runs/base --safetensors",
        "generate runs/base --prompt a --tokenizer",
        "runs plot runs/base --html",
        "supervise --status",
        "tokenize encode a.txt --tokenizer byte --out",
    ],
)
@pytest.mark.parametrize("text", ["", " "])
def test_flags_with_an_empty_text_are_refused_and_not_taken_as_left_out(
    words, text, capsys, tmp_path, monkeypatch
):
    """As `--json "$FILE"` where the variable is not set."""
    monkeypatch.chdir(tmp_path)
    name, *words = words.split()
    try:
        code = command(name).main([*words, text])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert f"{words[-1]}: is empty; give a value, or leave it out" in capsys.readouterr().err


ROOT = Path(__file__).parents[1]


def test_readme_names_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("`maxpipe train` and")
    (paragraph, *_) = text[start:].split("\n\n")
    assert {*re.findall(r"`(?:maxpipe )?(\w+)[` ]", paragraph)} >= {*COMMANDS}


def test_architecture_page_names_every_command_at_the_root():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if "the commands, thin" in line]
    files = {path.stem for path in (ROOT / "maxpipe").glob("*.py")}
    assert {*re.split(", ", line.split("    ")[0].strip())} == files & COMMANDS.keys()


def test_commands_in_a_locale_without_the_letters_of_a_path_take_it():
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "maxpipe.train", "base", "--print-config", "output_dir=räns"]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, **ascii_alone}, check=True
    )
    assert "output_dir: räns" in done.stdout.decode()
