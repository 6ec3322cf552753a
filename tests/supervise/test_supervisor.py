"""Supervisors and their trainers as processes; the trainers are a few lines of Python."""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.training_process import inherited

from maxpipe.devices.cluster import CLUSTER_VARIABLES, Place, Sizes, free_port
from maxpipe.supervise import council, supervisor
from maxpipe.supervise.council import End, Policy, Start
from maxpipe.supervise.process import Progress
from maxpipe.supervise.supervisor import Supervisor

# Does in each attempt what its argument says, such as "75 0": exit with 75, then with 0. "wait"
# waits, and exits with 75 after SIGTERM and 130 after Ctrl-C; "deaf" waits, whatever comes;
# "replica" waits when it has written a replica of step 5 into its memory; "elastic" waits when it
# has told that one process can go on alone, and of a step.
TRAINER = """
import faulthandler, os, pathlib, signal, sys, time
faulthandler.enable()
sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines: others write, too
index = os.environ.get("JAX_PROCESS_ID", "0")
log = pathlib.Path(sys.argv[1]) / f"attempts{index}"
with log.open("a") as file:
    names = ("MAXPIPE_JOB", "MAXPIPE_ATTEMPT", "JAX_COORDINATOR_ADDRESS")
    print(os.getpid(), *(os.environ.get(name, "-").replace(" ", "_") for name in names), file=file)
acts = sys.argv[2 + int(index)].split()
act = acts[min(len(log.read_text().splitlines()), len(acts)) - 1]

def waiting_here():
    while True:
        time.sleep(0.1)

def end(number, frame):
    print("got", number, flush=True)
    time.sleep(0.3)
    sys.exit(75 if number == signal.SIGTERM else 130)

handler = signal.SIG_IGN if act == "deaf" else end
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, handler)
print("ignored", signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN, flush=True)
signal.signal(signal.SIGUSR2, lambda number, frame: print("asked", number, flush=True))
if act == "deaf":
    faulthandler.disable()
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
memory = pathlib.Path(os.environ.get("MAXPIPE_MEMORY", "/nothing"))
held = sorted(path.name for path in memory.glob("*/*"))
print("memory", memory, "holds", *held, flush=True)
if act == "replica":
    (memory / "0a" / "5").mkdir(parents=True)
    (memory / "0a" / "5" / "data").write_text(index)
if act == "elastic":
    sizes = '"sizes": {"counts": [1], "wait_seconds": 0.5, "whole": "all"}, "step": 1, "at": 1.0'
    told = '{"attempt": %s, %s}' % (os.environ["MAXPIPE_ATTEMPT"], sizes)
    pathlib.Path(os.environ["MAXPIPE_PROGRESS"]).write_text(told)
count, whole = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "MAXPIPE_WHOLE"))
print("one of", count, "of", whole, flush=True)
print("ready", flush=True)
if act in ("wait", "deaf", "replica", "elastic"):
    waiting_here()
time.sleep(0.3)
sys.exit(int(act))
"""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


class Supervised:
    """Supervisors of one run, their output in files; `acts` are those of each `TRAINER`."""

    def __init__(self, directory, *acts):
        self.directory, self.acts = directory, acts
        self.port = free_port()
        self.processes = []

    def start(self, index):
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in CLUSTER_VARIABLES and not name.startswith(("JAX_", "SLURM", "MAXPIPE"))
        }
        if len(self.acts) > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{self.port}",
                "JAX_NUM_PROCESSES": str(len(self.acts)),
                "JAX_PROCESS_ID": str(index),
            }
        trainer = [sys.executable, "-c", TRAINER, str(self.directory), *self.acts]
        with self.log(index).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "maxpipe.supervise", "--pause", "0.1", "--", *trainer],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.processes[index : index + 1] = [process]

    def __enter__(self):
        for index in range(len(self.acts)):
            self.start(index)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def log(self, index):
        return self.directory / f"supervisor{index}.log"

    def output(self, index=0):
        return self.log(index).read_text()

    def attempts(self, index=0):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.directory / f"attempts{index}").read_text().splitlines()
            return [line.split() for line in lines]
        return []

    def wait_for(self, condition):
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, [self.output(i) for i in range(len(self.acts))]
            time.sleep(0.05)

    def ready(self, count, index=0):
        self.wait_for(lambda: self.output(index).splitlines().count("ready") == count)

    def all_ready(self, count):
        for index in range(len(self.acts)):
            self.ready(count, index)

    def kill_trainer(self, index):
        os.kill(int(self.attempts(index)[-1][0]), signal.SIGKILL)

    def codes(self):
        return [process.wait(60) for process in self.processes]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def memory_of(run, index, attempt=0):
    lines = [line for line in run.output(index).splitlines() if line.startswith("memory ")]
    _, path, _, *held = lines[attempt].split()
    return Path(path), held


def test_supervise_one_process_restarts_it_with_its_memory_and_passes_a_signal_on(tmp_path):
    with inherited(signal.SIGHUP, signal.SIG_DFL), Supervised(tmp_path, "wait replica wait") as run:
        run.ready(1)
        own, _ = memory_of(run, 0)
        run.processes[0].send_signal(signal.SIGUSR2)
        run.wait_for(lambda: f"asked {signal.SIGUSR2}\n" in run.output())
        shutil.rmtree(own.parent)
        run.kill_trainer(0)
        run.ready(2)
        assert memory_of(run, 0, attempt=1) == (own, []), "it is made again"
        run.kill_trainer(0)
        run.ready(3)
        assert memory_of(run, 0, attempt=2) == (own, ["5"]), "it outlives a trainer"
        os.killpg(run.processes[0].pid, signal.SIGHUP)  # as a terminal does
        assert run.codes() == [75]
    assert run.output().count("got 15") == 1
    assert "ignored True\n" in run.output(), "until the trainer has a handler"
    assert "restart 1 of at most 20 in 0.1 s" in run.output()
    jobs, numbers, coordinators = list(zip(*run.attempts(), strict=True))[1:]
    assert len({*jobs}) == 1, "the job has one name"
    assert [*numbers] == sorted({*numbers}), "each number is higher"
    assert {*coordinators} == {"-"}, "one process needs no coordinator"
    assert not own.parent.exists()


@pytest.mark.slow
def test_supervise_under_nohup_survives_its_terminal(tmp_path):
    with inherited(signal.SIGHUP, signal.SIG_IGN), Supervised(tmp_path, "wait") as run:
        run.ready(1)
        run.processes[0].send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert "got" not in run.output()
        run.processes[0].send_signal(signal.SIGINT)
        assert run.codes() == [130]


# Tells the run's directory, as a trainer does.
TELLS = """
import json, os, pathlib, sys, time
text = json.dumps({"run": sys.argv[1], "step": 0, "at": 0.0})
pathlib.Path(os.environ["MAXPIPE_PROGRESS"]).write_text(text)
time.sleep(1)
"""


def test_supervise_ends_though_a_file_system_stalls_and_writes_the_end_when_it_can(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor, "_LAST_STATUS_SECONDS", 0.1)
    stalled, goes_on, written = threading.Event(), threading.Event(), threading.Event()
    write = supervisor.write_atomically

    def stall(*words):
        stalled.set()
        goes_on.wait(30)
        write(*words)
        written.set()

    monkeypatch.setattr(supervisor, "write_atomically", stall)
    place, began = Place("localhost", 0, 1, 0), time.monotonic()
    command = [sys.executable, "-c", TELLS, str(tmp_path)]
    assert supervisor.supervise(command, place, Policy(), lambda text: None) == 0
    assert stalled.is_set()
    assert time.monotonic() - began < 15
    goes_on.set()
    assert written.wait(30)
    status = json.loads((tmp_path / "supervisor.json").read_text())
    assert status["state"] == "has ended with exit code 0"
    assert status["members"] == {"0": platform.node()}


class Remembered:
    def __init__(self):
        self.forgot = []

    def begin(self, addresses, word, *, forgets):
        self.forgot.append(forgets)
        ready = threading.Event()
        ready.set()
        return ready

    def rest(self):
        self.forgot.append("rest")


def supervisor_in(directory, *command, count=1, index=0, partners=None):
    place = Place("localhost", 0, count, index)
    return Supervisor(command, place, print, directory, partners or Remembered(), 1)


class Obedient:
    """A trainer that has ended once it is asked to."""

    def __init__(self, *_):
        self.code = None

    def poll(self):
        return self.code

    def end_within(self, seconds):
        self.code = -signal.SIGABRT


def test_supervisor_counts_an_attempt_without_a_step_as_part_of_the_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "TrainerProcess", Obedient)
    here = supervisor_in(tmp_path)

    def downtime_after(progress):
        here.handle(Start(1, 7, ""))
        here.look()
        here.progress_file.write_text(json.dumps(progress))
        here.end()
        return here._downtime

    before = time.time() - 100
    trained = downtime_after({"run": "r", "step": 3, "at": before})
    assert json.loads(trained)[0] == pytest.approx(100, abs=20)
    assert downtime_after({"run": "r", "step": 0, "at": 0.0}) == trained
    assert downtime_after({"run": "r", "step": 4, "at": before}) != trained


def test_supervisor_ends_its_trainer_by_the_most_urgent_order_and_says_why(tmp_path, capsys):
    here = supervisor_in(tmp_path, "sleep", "60", count=2, index=1)
    here.handle(Start(1, 7, "", (0, 1)))
    here.look()
    for seconds in (600, 0, 60):
        here.handle(End(seconds, "process 0 is lost" * (seconds == 600)))
    until = time.monotonic() + 20
    while here._trainer is not None:
        assert time.monotonic() < until
        here.look()
    assert capsys.readouterr().out.splitlines() == ["process 0 is lost", "process 1: SIGABRT"]


@pytest.mark.parametrize("quiet", [0.1, 9])
def test_supervisor_0_may_come_a_while_later(tmp_path, monkeypatch, capsys, quiet):
    monkeypatch.setattr(council, "QUIET_SECONDS", quiet)
    signals = []
    threading.Timer(1.5, signals.append, [signal.SIGTERM]).start()
    supervisor_in(tmp_path).follow(("localhost", free_port()), "", 60, signals)
    assert ("no supervisor 0 at localhost:" in capsys.readouterr().out) == (quiet < 1)


def test_supervisor_tells_a_new_council_the_attempt_and_the_sizes_of_its_last_trainer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(supervisor, "TrainerProcess", Obedient)
    here = supervisor_in(tmp_path, count=3, index=2)
    here.handle(Start(5, 7, "", (0, 1)))
    assert here.greeting("host").attempt == 0, "it has only waited"
    here.handle(Start(6, 7, "", (0, 1, 2)))
    here.look()
    sizes = Sizes((1, 2), 60.0, "all")
    here.progress_file.write_text(json.dumps(Progress(6, sizes=sizes)._asdict(), default=asdict))
    here.end()
    assert (here.greeting("host").attempt, here.greeting("host").sizes) == (6, sizes)


def test_supervisor_that_took_no_part_in_the_attempt_before_forgets_its_replicas(tmp_path):
    partners = Remembered()
    here = supervisor_in(tmp_path, count=3, index=2, partners=partners)
    for attempt, members, previous in ((1, (0, 1, 2), 0), (2, (0, 1, 2), 1), (3, (0, 1), 2)):
        here.handle(Start(attempt, 7, "", members, previous=previous))
        here.end()
    assert partners.forgot == [False, False, "rest"]
    assert here.greeting("host").attempt == 2
    here.handle(Start(4, 7, "", (0, 1, 2), previous=3))
    here.end()
    here.handle(Start(6, 7, "", (0, 1, 2), previous=5))  # 5 began while its line was lost
    assert partners.forgot[3:] == [True, True]


def test_supervise_command_that_is_not_there_ends_with_2(tmp_path):
    place, log = Place("localhost", 0, 1, 0), []
    command = [str(tmp_path / "nothing")]
    assert supervisor.supervise(command, place, Policy(), log.append) == 2
    assert f"cannot start {tmp_path}/nothing: No such file or directory" in log


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_supervise_two_processes_lose_a_supervisor_with_its_trainer_and_no_replica(tmp_path, lost):
    with Supervised(tmp_path, "replica 0", "replica 0") as run:
        run.all_ready(1)
        own, _ = memory_of(run, lost)
        run.wait_for(lambda: (own.parent / "copied").read_text() == '["0a/5"]')
        trainers = [int(run.attempts(index)[-1][0]) for index in (0, 1)]
        run.processes[lost].kill()
        run.processes[lost].wait()
        run.wait_for(lambda: not any(map(is_running, trainers)))
        assert run.processes[1 - lost].poll() is None
        run.start(lost)
        assert run.codes() == [0, 0]
    assert "in waiting_here" in run.output(1 - lost), "no stacks"
    for one, other in zip(run.attempts(0), run.attempts(1), strict=True):
        assert one[2:] == other[2:], "number and coordinator are the same"
    ports = [attempt[3] for attempt in run.attempts()]
    assert len({*ports}) == 2
    assert f"localhost:{run.port}" not in ports, "the supervisors listen there"
    paths, held = zip(*(memory_of(run, index, attempt=1) for index in (0, 1)), strict=True)
    assert held == (["5"], ["5"])
    assert paths[lost] != own, "it is the memory of the supervisor that was killed"
    assert not any(path.parent.exists() for path in (own, *paths))


@pytest.mark.slow
def test_supervise_restarts_when_a_process_is_stopped_and_another_one_notices(tmp_path):
    with Supervised(tmp_path, "wait 0", "deaf 0") as run:
        run.all_ready(1)
        os.kill(int(run.attempts(1)[0][0]), signal.SIGSTOP)
        os.kill(int(run.attempts(0)[0][0]), signal.SIGABRT)
        assert run.codes() == [0, 0]


def test_supervise_goes_on_without_a_lost_supervisor_and_with_it_when_it_is_back(tmp_path):
    with Supervised(tmp_path, "elastic elastic 0", "wait 0") as run:
        run.all_ready(1)
        run.processes[1].kill()
        run.processes[1].wait()
        run.ready(2, 0)
        run.start(1)
        assert run.codes() == [0, 0]
    output = run.output()
    assert re.findall("one of .*", output) == ["one of 2 of ", "one of 1 of all", "one of 2 of "]
    assert "with 1 of 2 processes (0): process 1 has not come back in 0.5 s" in output
    assert output.index("saves, to go on with 2 of 2") < output.rindex("got 15")
