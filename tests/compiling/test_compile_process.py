"""The process that compiles a row of a plan."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys
from maxpipe.compiling.compile_process import compile_configuration
sys.executable = sys.argv[1]
compile_configuration("", print)
"""


def started(path):
    """Return the number that another process writes into a file."""
    for _ in range(600):
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.05)
    raise AssertionError("nothing was started")


def test_the_compiler_ends_when_the_plan_is_told_to_end(tmp_path):
    compiler, number = tmp_path / "compiler", tmp_path / "number"
    compiler.write_text(f"#!/bin/sh\necho $$ > {number}\nexec sleep 60\n")
    compiler.chmod(0o755)
    plan = subprocess.Popen([sys.executable, "-c", PROGRAM, str(compiler)])
    child = started(number)
    plan.terminate()
    assert plan.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
