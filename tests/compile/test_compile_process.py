"""The process that compiles a row of a plan, and what is read of its report."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest

from maxpipe.compile.compile_process import compile_command, compile_configuration, proof_of
from maxpipe.plan.number import Seconds

PROGRAM = """
import sys
from maxpipe.compile.compile_process import compile_configuration
sys.executable = sys.argv[1]
compile_configuration("", print)
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    file = tmp_path / "compiler"

    def _compiler(script):
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return file

    return _compiler


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_compiler_ends_with_a_plan_that_is_killed(tmp_path, compiler):
    held, python = tmp_path / "held", sys.executable
    file = compiler(f"exec 3> {held}\necho begun >&3\nexec sleep 60")
    os.mkfifo(held)
    with (
        subprocess.Popen(["cat", held], stdout=subprocess.PIPE, text=True) as reader,
        subprocess.Popen([python, "-c", PROGRAM, file]) as plan,
    ):
        assert reader.stdout.readline() == "begun\n"
        plan.kill()
        assert plan.wait(60) == -signal.SIGKILL
        assert reader.wait(20) == 0  # the compiler does not hold the file any more


def test_a_plan_that_is_stopped_ends_the_compiler(tmp_path, compiler, monkeypatch):
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    for name, error in (("INT", KeyboardInterrupt), ("TERM", SystemExit)):
        compiler(f"echo $$ > {tmp_path / 'pid'}\nsleep 1\nkill -{name} $PPID\nexec sleep 60")
        with pytest.raises(error):
            compile_configuration("", print)
        assert not [*(tmp_path / "files").iterdir()]
        with suppress(ChildProcessError):  # it has ended, and has been waited for
            _, status = os.waitpid(int((tmp_path / "pid").read_text()), 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_compiler_without_a_report_fails_for_the_reason_that_it_printed(compiler):
    check = "F0000 target.cc:12] Check failed: shape.rank() == 2"
    words = ["base.yml", "compile.topology=v5p:2x2x1", "--import", "mine"]
    for script, failure in {
        "exit 2": "no output",
        "echo config error: x: broken\necho 1 problem\nexit 2": "config error: x: broken",
        "echo 'compiling   for 45 s'\nkill -KILL $$": (
            "the compiler was ended by SIGKILL; this machine may have too little memory"
        ),
        f"echo '{check}'\necho '@ 0x7f main'\nkill -ABRT $$": (
            f"the compiler was ended by SIGABRT: {check}"
        ),
        'echo "$LIBTPU_INIT_ARGS" "$@"\nexit 2': f"--a=1 -m maxpipe.compile {' '.join(words)} --js",
    }.items():
        compiler(script)
        proof = compile_command(words, print, {"LIBTPU_INIT_ARGS": "--a=1"})
        assert proof.failure.startswith(f"not compiled: {failure}")


def test_parts_of_a_compiled_step_are_those_of_its_report():
    expected = {
        ("sequential", 0.0, None): Seconds(1.5, 0.5, 0.0),
        # Units are known, and what idle ones take, a quarter of what is waited for included.
        ("scheduled", 0.2, 0.5): Seconds(1.125, 0.375, 0.5),
        ("mpmd", 0.2, 0.5): Seconds(1.0, 0.5, 0.5),  # idle stages wait for nothing else
        ("circular", 0.25, None): Seconds(1.125, 0.375, 0.5),  # a share of all slots
    }
    for (engine, share, bubble), parts in expected.items():
        seconds = {"matrix products": 1.5, "collectives": 0.5}
        report = {"engine": engine, "memory": {"needed_bytes": 7}, "fits": True, "bubble": share}
        report |= {"predicted_step_seconds": 2.0, "predicted": {"bubble": bubble, "parts": seconds}}
        proof = proof_of(report, 1.0)
        assert (proof.memory, proof.seconds, proof.fits) == (7, 2.0, True)
        assert proof.parts == pytest.approx(parts), engine
