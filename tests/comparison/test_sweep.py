"""`maxpipe.train --sweep`: which runs it makes, what it refuses, and how it ends."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.commands import exit_code

from maxpipe import runs, train
from maxpipe.comparison import sweep as sweep_module
from maxpipe.comparison.sweep import plan_members
from maxpipe.config import load


def members(*words, overrides=()):
    return plan_members(load("base", overrides), "base", overrides, words)


def test_sweep_has_a_named_run_for_each_combination():
    rates = "optimizer.learning_rate=1e-3", "optimizer.learning_rate=3e-3"
    planned = members(rates[0], "model.num_layers=4,8", rates[1], "seed=7")
    runs = [f"{rate}-num_layers_{layers}" for rate in ("1e-3", "3e-3") for layers in (4, 8)]
    assert [member.name for member in planned] == [f"base-learning_rate_{run}" for run in runs]
    assert planned[1].words == ("optimizer.learning_rate=1e-3", "model.num_layers=8", "seed=7")
    assert planned[1].directory.as_posix() == "runs/base-learning_rate_1e-3-num_layers_8"


def test_sweep_splits_at_commas_outside_of_brackets_and_quotes_and_takes_sections():
    for key, first, second, name in [
        ("telemetry.profile_steps", "[1, 2]", "[3, 4]", "base-profile_steps_3_4"),
        ("mesh.ici", "{stage: 2, fsdp: 2}", "{stage: 4, fsdp: 1}", "base-ici_stage_4_fsdp_1"),
    ]:
        planned = members(f"{key}={first},{second}", overrides=["pipeline.num_repeats=1"])
        assert planned[0].words == (f"{key}={first}",)
        assert planned[1].name == name


def test_sweep_names_stay_legal_short_and_different():
    planned = members("mesh.ici.fsdp=2,-1", "mesh.dcn.fsdp=1,-1", overrides=["run_name=mine"])[:3]
    assert planned[0].name == "mine-mesh_ici_fsdp_2-mesh_dcn_fsdp_1"
    assert len({member.name for member in planned}) == 3
    path = "/" + "x" * 300
    long = members(f"data.path={path}1,{path}2", overrides=["data.source=text"])
    assert [member.name for member in long] == ["base-1", "base-2"]
    same = members("data.path=/a+b,/a_b", overrides=["data.source=text"])
    assert [member.name for member in same] == ["base-path_a_b", "base-2"]


def test_sweep_that_is_wrong_ends_with_2_before_anything_runs(monkeypatch, capsys):
    for words, message in [
        (["steps"], "--sweep: 'steps' is not of the form key=value,value"),
        (["steps=4"], "--sweep: names one run"),
        (["step=4,5"], "step (command line): unknown key; did you mean steps"),
        (["run_name=a,b"], "--sweep: run_name is that of all runs"),
        (["seed=1,x"], "seed (command line): expected"),
        (["eval.every=5,10"], "eval.every (command line): set twice"),
        (["model.num_layers=4,6"], "num_layers"),
        (["compile.save=a,b"], "compile.save: training stores no executable"),
    ]:
        monkeypatch.setattr(sweep_module, "_run", lambda _: pytest.fail("a run began"))
        assert exit_code(train.main, ["base", "eval.every=50", "--sweep", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.endswith("1 problem found\n")


@pytest.fixture
def ran(monkeypatch, tmp_path):

    begun = Mock()
    monkeypatch.setattr(sweep_module, "_run", begun)
    monkeypatch.chdir(tmp_path)
    return begun


def test_sweep_goes_on_after_a_failure_and_says_so_at_the_end(ran, capsys):
    ran.side_effect = (0, 42, 0)
    words = ["base", "run_name=own", "steps=5", "--import", "math", "--sweep", "seed=1,2,3"]
    assert train.main(words) == 1
    of_its_own = ["seed=2", "run_name=own-seed_2", "--import", "math"]
    began = [sys.executable, "-m", "maxpipe.train", "base", "steps=5", *of_its_own]
    assert ran.call_args_list[1].args == (began,)
    printed = capsys.readouterr().out
    assert "sweep       2 of 3: own-seed_2 (seed=2)\n" in printed
    assert "own-seed_2 failed: exit code 42; the others go on" in printed
    assert "sweep       2 of 3 runs are done, own-seed_2 failed with exit code 42\n" in printed


def test_sweep_compares_the_others_of_a_run_that_failed_before_its_first_step(
    ran, monkeypatch, capsys
):
    """As one that does not fit into memory: it has a configuration and no figures."""
    monkeypatch.setattr(subprocess, "run", lambda words, check: runs.main([*words[3:]]))
    ran.side_effect = (0, 1)
    done, failed = Path("runs", "base-seed_1"), Path("runs", "base-seed_2")
    done.mkdir(parents=True)
    failed.mkdir()
    row = '{"step": 1, "loss": 2.5, "grad_norm": 1.0, "step_seconds": 1.0}\n'
    (done / "metrics.jsonl").write_text(row)
    for root in (done, failed):
        (root / "config.yml").write_text("run_name: x\n")
    assert train.main(["base", "--sweep", "seed=1,2"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^base-seed_1 .*2\.5", printed, re.MULTILINE)
    assert "sweep       1 of 2 runs are done, base-seed_2 failed with exit code 1\n" in printed


def test_sweep_that_a_signal_stops_begins_no_other_run(ran, capsys):
    for code in (75, 130):
        ran.side_effect = (0, code)
        assert train.main(["base", "--sweep", "seed=1,2,3"]) == code
        assert ran.call_count == 2
        ran.reset_mock()
        said = "stopped in base-seed_2; the same command goes on with it"
        assert said in capsys.readouterr().out


RUN = """\
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("saved", flush=True), sys.exit(130)))
signal.signal(signal.SIGUSR2, lambda *_: print("asked", flush=True))
print("begun", flush=True)
time.sleep(60)
"""
SWEEP = (
    f"from maxpipe.comparison import sweep; exit(sweep._run([{sys.executable!r}, '-c', {RUN!r}]))"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_sweep_hands_a_signal_on_waits_for_the_save_and_leaves_no_run_behind():
    for number, code, printed in ((signal.SIGINT, 130, "saved\n"), (signal.SIGKILL, -9, "")):
        words = [sys.executable, "-c", SWEEP]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGUSR2)  # for a trace
            assert process.stdout.readline() == "asked\n"
            process.send_signal(number)
            # The end of the output: nobody holds it any more.
            assert process.communicate(timeout=20)[0] == printed
        assert process.returncode == code
