"""The process that compiles a row of a plan, and what is read of its report."""

import os
import signal
import subprocess
import sys

import pytest

from maxpipe.compile import compile_process
from maxpipe.plan.search.seconds import Seconds

PROGRAM = """
import sys
from maxpipe.compile.compile_process import compile_configuration
sys.executable = sys.argv[1]
compile_configuration("", print)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_compiler_ends_with_a_plan_that_is_killed(tmp_path):
    compiler, held = tmp_path / "compiler", tmp_path / "held"
    compiler.write_text(f"#!/bin/sh\nexec 3> {held}\necho begun >&3\nexec sleep 60\n")
    compiler.chmod(0o755)
    os.mkfifo(held)
    with (
        subprocess.Popen(["cat", held], stdout=subprocess.PIPE, text=True) as reader,
        subprocess.Popen([sys.executable, "-c", PROGRAM, compiler]) as plan,
    ):
        assert reader.stdout.readline() == "begun\n"
        plan.kill()
        assert plan.wait(60) == -signal.SIGKILL
        assert reader.wait(20) == 0  # the compiler does not hold the file any more


class FakeCompiler:
    """A process that acts by a list: what it does while one waits for it, and its end."""

    def __init__(self, acts, code, at_start=None, at_wait=None):
        self.acts, self.code, self.at_start, self.at_wait = acts, code, at_start, at_wait

    def started(self, *args, **options):
        self.act("start", self.at_start)
        return self

    def wait(self, seconds):
        self.act("wait", self.at_wait)
        return self.code

    def act(self, name, action):
        if action:
            action()
        self.acts.append(name)  # not reached when the action raises

    def terminate(self):
        self.acts.append("end")

    def kill(self):
        self.acts.append("kill")

    def poll(self):
        return self.code


@pytest.mark.parametrize(
    ("number", "error", "moment"),
    [
        (signal.SIGTERM, SystemExit, "start"),
        (signal.SIGHUP, SystemExit, "wait"),
        (signal.SIGINT, KeyboardInterrupt, "wait"),
    ],
)
def test_a_signal_ends_the_compiler_and_interrupts_neither_start_nor_wait(
    number, error, moment, monkeypatch
):
    acts = []
    raised_then = {f"at_{moment}": lambda: signal.raise_signal(number)}
    compiler = FakeCompiler(acts, -signal.SIGTERM, **raised_then)
    monkeypatch.setattr(subprocess, "Popen", compiler.started)
    before = signal.signal(number, lambda *_: pytest.fail("the compiler would be left behind"))
    own = signal.getsignal(number)
    try:
        with pytest.raises(error) as raised:
            compile_process.report_of([], print)
        assert acts == ["start", "end", "wait"]
        assert error is KeyboardInterrupt or raised.value.code == 128 + number
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def test_a_second_signal_ends_the_compiler_by_force(monkeypatch):
    def twice():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    acts = []
    compiler = FakeCompiler(acts, -signal.SIGKILL, at_wait=twice)
    monkeypatch.setattr(subprocess, "Popen", compiler.started)
    with pytest.raises(SystemExit):
        compile_process.report_of([], print)
    assert acts == ["start", "end", "kill", "wait"]


def test_a_signal_that_is_ignored_stays_so_while_the_compiler_runs(monkeypatch):
    compiler = FakeCompiler([], 2, at_wait=lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(subprocess, "Popen", compiler.started)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert compile_process.report_of([], print) == "no output"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_compiler_that_is_ended_by_a_signal_is_no_problem_of_the_configuration(
    tmp_path, monkeypatch
):
    compiler, check = tmp_path / "compiler", "F0000 target.cc:12] Check failed: shape.rank() == 2"
    failures = {
        "echo 'compiling   for 45 s'\nkill -KILL": "SIGKILL; this machine may have too little memo",
        f"echo '{check}'\necho '@ 0x7f main'\nkill -ABRT": f"SIGABRT: {check}",
    }
    for script, failure in failures.items():
        compiler.write_text(f"#!/bin/sh\n{script} $$\n")
        compiler.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(compiler))
        proof = compile_process.compile_configuration("", print)
        assert f"ended by {failure}" in proof.failure


def test_a_process_that_takes_long_is_noted_ever_less_often(monkeypatch):
    class Slow(FakeCompiler):
        def wait(self, seconds):
            self.acts.append(seconds)
            if len(self.acts) < 5:
                raise subprocess.TimeoutExpired("compiler", seconds)
            return self.code

    process, lines = Slow([], 2), []
    monkeypatch.setattr(subprocess, "Popen", process.started)
    compile_process.report_of([], lines.append)
    assert process.acts == ["start", 15, 30, 60, 120]
    assert len(lines) == 3
    assert all(line.startswith("            for ") for line in lines)


def test_parts_of_a_compiled_step_are_those_of_its_report(monkeypatch):
    expected = {
        ("sequential", 0.0, None): Seconds(1.5, 0.5, 0.0),
        # Units are known, and what idle ones take, a quarter of what is waited for included.
        ("scheduled", 0.2, 0.5): Seconds(1.125, 0.375, 0.5),
        ("mpmd", 0.2, 0.5): Seconds(1.0, 0.5, 0.5),  # idle stages wait for nothing else
        ("circular", 0.25, None): Seconds(1.125, 0.375, 0.5),  # a share of all slots
    }
    for (engine, share, bubble), parts in expected.items():
        report = {
            "engine": engine,
            "memory": {"needed_bytes": 7},
            "fits": True,
            "bubble": share,
            "predicted_step_seconds": 2.0,
            "predicted": {"bubble": bubble, "parts": {"matrix products": 1.5, "collectives": 0.5}},
        }
        monkeypatch.setattr(compile_process, "report_of", lambda *_, report=report: report)
        proof = compile_process.compile_configuration("", print)
        assert proof.seconds == 2.0
        assert proof.parts == pytest.approx(parts), engine


def test_the_compiler_gets_words_and_variables_and_answers_with_its_last_problem(
    tmp_path, monkeypatch
):
    compiler, seen = tmp_path / "compiler", tmp_path / "seen"
    compiler.write_text(
        f'#!/bin/sh\necho "$LIBTPU_INIT_ARGS" "$@" > {seen}\necho config error: x: broken\nexit 2\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(compiler))
    words = ["base.yml", "compile.topology=v5p:2x2x1", "--import", "mine"]
    proof = compile_process.compile_command(words, print, {"LIBTPU_INIT_ARGS": "--a=1"})
    assert proof.failure == "not compiled: config error: x: broken"
    variable, *command = seen.read_text().split()
    assert (variable, command[:6]) == ("--a=1", ["-m", "maxpipe.compile", *words])
