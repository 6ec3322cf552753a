"""A command whose console is closed, narrow or interrupted leaves no traceback."""

import faulthandler
import io
import os
import signal
import subprocess
import sys

import pytest
from helpers.training_process import DEADLINE_SECONDS, command, steps_of

from maxpipe import ctrl_c
from maxpipe.__main__ import COMMANDS
from maxpipe.config.terminal import CLOSED_PIPE, INTERRUPTED, no_tracebacks

ONE_DEVICE = ("mesh.simulated_devices=0", "mesh.ici.stage=1", "mesh.ici.fsdp=1")

INTERRUPTED_BY_AN_IMPORT = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "maxpipe.config":
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
                os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)
module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def read_one_line(words, environment=None):
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
        return process.wait(DEADLINE_SECONDS), error


def test_console_is_closed_training_continues_and_schedule_ends_quietly(tmp_path):
    words = command(tmp_path, *ONE_DEVICE, "mesh.ici.data=8", "steps=3")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, error = read_one_line(["-m", "maxpipe.train", *words], ascii_only)
    assert code == 0, error
    assert error.count("standard output cannot be written: Broken pipe; the run continues") == 1
    assert "Traceback" not in error
    assert "Exception ignored" not in error
    assert sorted(steps_of(tmp_path)) == [1, 2, 3]
    # What only prints ends.
    words = ["1f1b", "stages=16", "microbatches=200"]
    code, error = read_one_line(["-m", "maxpipe.schedule", *words])
    assert error == ""
    assert code in (0, CLOSED_PIPE)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] * (module != "maxpipe.train"))
        for module in ("maxpipe", *(f"maxpipe.{name}" for name in COMMANDS))
    ],
)
def test_command_interrupted_while_modules_are_imported_has_stacks_and_says_one_line(module):
    words = [sys.executable, "-c", INTERRUPTED_BY_AN_IMPORT, module, "schedule"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == INTERRUPTED
    stacks, _, line = ended.stderr.strip().rpartition("\n")
    assert line == "stopped by Ctrl-C"
    assert "(most recent call first):\n" in stacks
    assert "in find_spec\n" in stacks


def test_ctrl_c_is_an_exception_in_main_and_no_traceback_around_it(monkeypatch, capfd):
    handlers = []

    def end(code):
        raise SystemExit(code)

    def main():
        handlers.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr(ctrl_c.os, "_exit", end)
    before = signal.getsignal(signal.SIGINT)
    try:
        ctrl_c.expect()
        with pytest.raises(SystemExit, match="130"):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit, match="130"):
            ctrl_c.run(main)
        with pytest.raises(SystemExit, match="3"):
            ctrl_c.run(lambda: 3)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        faulthandler.unregister(signal.SIGUSR1)
    assert handlers == [signal.default_int_handler]
    assert capfd.readouterr().err == "\nstopped by Ctrl-C\n" * 2


def test_no_tracebacks_characters_beyond_the_encoding_are_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with no_tracebacks():
        print("h\u00e9 \u2603")
    assert raw.getvalue() == b"h\\xe9 \\u2603\n"
