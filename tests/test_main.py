"""`maxpipe COMMAND`: every command under one name."""

import faulthandler
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import command, exit_code

import maxpipe
from maxpipe import ctrl_c
from maxpipe.__main__ import COMMANDS, main


def test_main_in_a_locale_without_the_letters_of_a_path_and_with_an_error_is_as_the_module():
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(*words):
        train = [sys.executable, "-m", "maxpipe", "train", *words]
        return subprocess.run(train, capture_output=True, env={**os.environ, **ascii_alone})

    assert "output_dir: räns" in run("base", "--print-config", "output_dir=räns").stdout.decode()
    wrong = run("nowhere.yml")
    assert wrong.returncode == 2
    assert b"config error: there is no file nowhere.yml" in wrong.stderr


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
def test_main_help_of_a_command_names_the_command(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)  # what pytest has enabled stays
    monkeypatch.setattr(ctrl_c, "expect", lambda: None)
    for name in COMMANDS:
        assert main([name, "--help"]) == 0, name
        assert f"python -m maxpipe.{name}" in capfd.readouterr().out


def test_main_without_a_command_lists_the_commands_or_says_its_version(capsys):
    assert (main([]), main(["trian"])) == (0, 2)
    shown = capsys.readouterr()
    assert all(name in shown.out for name in COMMANDS)
    assert "there is no command 'trian'; did you mean train?" in shown.err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"maxpipe {maxpipe.__version__}\n"


WITH_A_NAME = (
    "compile base compile.topology=cpu --units",
    "compile base compile.topology=cpu --json",
    "plan base --topology",
    "schedule gpipe --csv",
    "evaluate runs/base --tasks a --json",
    "export runs/base --safetensors",
    "generate runs/base --prompt a --tokenizer",
    "runs plot runs/base --html",
    "supervise --status",
    "tokenize encode a.txt --tokenizer byte --out",
)


def test_flags_with_an_empty_text_are_refused_and_not_taken_as_left_out(
    capsys, tmp_path, monkeypatch
):
    """As `--json "$FILE"` where the variable is not set."""
    monkeypatch.chdir(tmp_path)
    for line, text in itertools.product(WITH_A_NAME, ("", " ")):
        name, *words = line.split()
        assert exit_code(command(name).main, [*words, text]) == 2, line
        message = f"{words[-1]}: is empty; give a value, or leave it out"
        assert message in capsys.readouterr().err, line


ROOT = Path(__file__).parents[1]


def test_readme_and_architecture_page_name_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("`maxpipe train` and")
    (paragraph, *_) = text[start:].split("\n\n")
    assert {*re.findall(r"`(?:maxpipe )?(\w+)[` ]", paragraph)} >= {*COMMANDS}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if "the commands, thin" in line]
    files = {path.stem for path in (ROOT / "maxpipe").glob("*.py")}
    assert {*re.split(", ", line.split("    ")[0].strip())} == files & COMMANDS.keys()
