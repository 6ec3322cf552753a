"""`maxpipe COMMAND`: every command under one name."""

import subprocess
import sys

import pytest

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


def test_main_unknown_command_ends_with_2_and_lists_the_commands(capsys):
    assert main(["trian"]) == 2
    shown = capsys.readouterr().err
    assert "there is no command 'trian'" in shown
    assert "train" in shown
