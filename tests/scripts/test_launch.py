"""Test the launch scripts with fake commands on the PATH that record their calls."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import scripts
from helpers.training_process import inherited

SCRIPTS = scripts.SCRIPTS / "launch"
jobset = scripts.load_script("launch/gke/jobset")
AWKWARD = 'run_name=it\'s $(touch pwned) "x"; rm -rf *'

NOTES_AND_ANSWERS = """#!{python}
import json, os, sys
with open({notes!r}, "a") as notes:
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=notes)
answers = json.load(open({answers!r}))
for pattern, answer in answers.items():
    if pattern in " ".join(sys.argv):
        print(answer.pop(0) if len(answer) > 1 else answer[0])
        json.dump(answers, open({answers!r}, "w"))
        sys.exit(0)
"""


class Fakes:
    def __init__(self, directory):
        self.directory = directory
        self.notes, self.answers = directory / "notes", directory / "answers"
        self.notes.touch()
        self.answer({})

    def add(self, name):
        values = {"python": sys.executable, "notes": str(self.notes), "answers": str(self.answers)}
        script(self.directory / name, NOTES_AND_ANSWERS.format(**values))

    def answer(self, answers):
        self.answers.write_text(json.dumps(answers))

    def calls(self, name):
        calls = [json.loads(line) for line in self.notes.read_text().splitlines()]
        self.notes.write_text("")
        return [call[1:] for call in calls if call[0] == name]

    def run(self, *words, **environment):
        path = f"{self.directory}{os.pathsep}{os.environ['PATH']}"
        inherited = {name: v for name, v in os.environ.items() if name != "PYTHON"}
        own = {"PATH": path, "POLL_SECONDS": "0", "TMPDIR": str(self.directory)}
        return subprocess.run(
            list(map(str, words)),
            env=inherited | own | environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def fakes(tmp_path):
    return Fakes(tmp_path)


def script(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


class TestLocal:
    def test_local_starts_every_process_and_exits_with_the_code_of_supervisor_0(self, fakes):
        done = fakes.run(SCRIPTS / "local.sh", "--dry-run", "3", "a.yml", AWKWARD, PYTHON="python")
        for index, line in enumerate(done.stderr.splitlines(), start=0):
            words = shlex.split(line.removeprefix("+ "))
            assert words[-3:] == ["maxpipe.train", "a.yml", AWKWARD]
            assert {f"JAX_PROCESS_ID={index}", "JAX_NUM_PROCESSES=3"} <= {*words}
        assert index == 2
        python = script(
            fakes.directory / "python",
            "#!/bin/bash",
            '[ "$1" = -c ] && echo 1 && exit',
            "c=($CODES); exit ${c[JAX_PROCESS_ID]}",
        )
        for codes in ("0 0", "134 137"):
            done = fakes.run(SCRIPTS / "local.sh", "2", "a.yml", CODES=codes, PYTHON=str(python))
            assert done.returncode == int(codes.split()[0]), done.stderr
        for words in ([], ["2"], ["0", "a.yml"], ["two", "a.yml"]):
            done = fakes.run(SCRIPTS / "local.sh", *words)
            assert (done.returncode, "usage: local.sh" in done.stderr) == (2, True), words

    def test_local_with_a_signal_forwards_it_once_to_all_and_waits(self, fakes):
        python = script(
            fakes.directory / "python",
            f"#!{sys.executable}",
            "import signal, sys, time",
            "if sys.argv[1] == '-c': sys.exit(print(1))",
            "def end(number, frame):",
            "    print('got', number, flush=True); time.sleep(0.3); sys.exit(75)",
            "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):",
            "    signal.signal(number, end)",
            "print('ready', flush=True); time.sleep(60)",
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            logs = fakes.directory / f"logs {int(number)}"  # which is made
            with inherited(signal.SIGHUP, signal.SIG_DFL):
                process = subprocess.Popen(
                    [SCRIPTS / "local.sh", "2", "a.yml"],
                    env={**os.environ, "PYTHON": str(python), "LOG_DIR": str(logs)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            assert process.stdout.readline() == "ready\n"
            until_written(log := logs / "local-1.log")
            os.killpg(process.pid, number)  # as a terminal does
            assert process.communicate(timeout=30)[0] == f"got {int(number)}\n"
            assert log.read_text() == f"ready\ngot {int(number)}\n"
            assert process.returncode == 75


def until_written(file):
    until = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)


class TestTpuVm:
    STATE = "state.state"

    @pytest.fixture
    def tpu_vm(self, fakes):
        fakes.add("gcloud")
        return lambda *words: fakes.run(SCRIPTS / "tpu_vm.sh", "--zone", "z1", *words)

    def commands(self, fakes):
        calls = fakes.calls("gcloud")
        assert all(call[:2] == ["compute", "tpus"] and "--zone" in call for call in calls)
        return [call[2:] for call in calls if "describe" not in call]

    def test_resource_is_created_once_set_up_made_anew_after_preemption_and_deleted(
        self, fakes, tpu_vm
    ):
        fakes.answer({self.STATE: ["", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"]})
        done = tpu_vm("create", "pod", "--type", "v5p-16", "--spot", "--project", "p")
        assert done.returncode == 0, done.stderr
        (call,) = self.commands(fakes)
        assert call[:5] == ["queued-resources", "create", "pod", "--node-id", "pod"]
        assert {"v5p-16", "v2-alpha-tpuv5", "--spot", "--project"} <= set(call)
        for state, code, said in (("ACTIVE", 0, ""), ("FAILED", 2, "pod is FAILED")):
            fakes.answer({self.STATE: [state]})
            done = tpu_vm("create", "pod", "--type", "v5p-16")
            assert (done.returncode, said in done.stderr) == (code, True)
        fakes.answer({})
        assert tpu_vm("delete", "another").returncode == 0
        assert self.commands(fakes) == []
        # The others reach every worker of every slice.
        fakes.answer({"nodeCount": ["2"]})
        fakes.add("git")
        assert tpu_vm("setup", "pod").returncode == 0
        calls = self.commands(fakes)
        nodes = ("pod-0", "pod-1")
        reached = [(call[1], node) for call in calls for node in nodes if node in " ".join(call)]
        assert sorted(reached) == [(kind, node) for kind in ("scp", "ssh") for node in nodes]
        assert all("--worker=all" in call for call in calls)
        # A preempted one is made anew.
        fakes.answer({self.STATE: ["SUSPENDED", "SUSPENDED", "", "ACTIVE"]})
        done = tpu_vm("resume", "pod", "--type", "v5p-16", "--", "a.yml")
        assert done.returncode == 0, done.stderr
        kinds = [call[1] for call in self.commands(fakes)]
        assert kinds == ["delete", "create", "scp", "ssh", "ssh"]

    def test_run_called_twice_starts_the_given_words_and_flags_once_and_status_says_how_it_is(
        self, fakes, tpu_vm, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_a=1 {AWKWARD}")
        monkeypatch.setenv("MAXPIPE_JOB", AWKWARD)
        assert tpu_vm("run", "pod", "--", "a.yml", AWKWARD).returncode == 0
        (call,) = self.commands(fakes)
        remote = call[call.index("--command") + 1]
        worker = tmp_path / "worker"
        (bin_directory := worker / "maxpipe" / ".venv" / "bin").mkdir(parents=True)
        script(
            bin_directory / "python",
            "#!/bin/bash",
            'printf "%s\\0" "$@" "$LIBTPU_INIT_ARGS" "$MAXPIPE_JOB" >>words',
            "echo . >>attempts; sleep 1; exit 7",
        )
        for said in ("", "already running\n"):
            assert subprocess.check_output(["bash", "-c", remote], cwd=worker, text=True) == said
        until_written(exit_code := worker / "maxpipe" / "exit_code")
        assert exit_code.read_text() == "7\n"
        assert (worker / "maxpipe" / "attempts").read_text() == ".\n"
        words = (worker / "maxpipe" / "words").read_text().split("\0")[:-1]
        training = [".venv/bin/python", "-m", "maxpipe.train", "a.yml", AWKWARD]
        variables = [f"--xla_a=1 {AWKWARD}", AWKWARD]
        assert words == ["-m", "maxpipe.supervise", "--", *training, *variables]
        assert not list(tmp_path.rglob("pwned"))

        assert tpu_vm("status", "pod").returncode == 0
        (call,) = self.commands(fakes)
        remote = ["bash", "-c", call[call.index("--command") + 1]]
        for files, said in (
            ({}, "not started"),
            ({"pid": str(os.getpid())}, "running"),
            ({"pid": "", "exit_code": "75"}, "ended with exit code 75"),
            ({"pid": ""}, "ended without an exit code"),
        ):
            worker = tmp_path / said.replace(" ", "-")
            (worker / "maxpipe" if files else worker).mkdir(parents=True)
            for name, text in files.items():
                (worker / "maxpipe" / name).write_text(f"{text}\n")
            assert subprocess.check_output(remote, cwd=worker, text=True) == f"{said}\n"

        # Help, dry runs and mistakes call nothing.
        assert "create NAME --zone" in tpu_vm("--help").stdout
        for action in ("create", "setup", "run", "status", "logs", "resume", "delete"):
            words = ("--dry-run", "--type", "v5p-16", "--slices", "2", "--", "a.yml")
            done = tpu_vm(action, "pod", *words)
            assert done.returncode == 0, done.stderr
            assert "+ gcloud compute tpus" in done.stderr
        for words, message in (
            ("run pod", "what to train is missing"),
            ("create pod --type v9-8", "no default for --type v9-8"),
            ("create pod;ls --type v4-8", "lower-case letters"),
            ("create pod --slices x", "--slices is not a number"),
            ("fly pod", "there is no command fly"),
            ("create", "usage"),
        ):
            done = tpu_vm(*words.split())
            assert (done.returncode, message in done.stderr) == (2, True), (words, done.stderr)
        assert fakes.calls("gcloud") == []


def test_slurm_job_is_requeued_after_retryable_codes_20_times_at_most(fakes):
    fakes.add("scontrol")
    script(fakes.directory / "srun", "#!/bin/bash", "shift", '"$@"')
    noted = 'printf "%s\\0" "$MAXPIPE_SECRET" "$@" >"$OUT"; exit $CODE'
    script(fakes.directory / "python", "#!/bin/bash", noted)
    out = fakes.directory / "words"

    def job(code, *words, **environment):
        variables = {"CODE": str(code), "OUT": str(out), "SLURM_JOB_ID": "9", **environment}
        return fakes.run("bash", SCRIPTS / "slurm.sbatch", *words, **variables)

    done = job(0, "--dry-run", "a.yml")
    assert (done.returncode, "+ srun" in done.stderr) == (0, True)
    assert not out.exists()
    for code, restarts, again in ((0, 0, 0), (75, 0, 1), (134, 0, 1), (42, 0, 0), (75, 20, 0)):
        done = job(code, "a.yml", AWKWARD, SLURM_RESTART_COUNT=str(restarts))
        assert done.returncode == code, done.stderr
        assert fakes.calls("scontrol") == [["requeue", "9"]] * again
        secret, *words = out.read_text().split("\0")[:-1]
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert words[:2] == ["-m", "maxpipe.supervise"]
        training = ["python", "-m", "maxpipe.train", "a.yml", AWKWARD]
        assert words[words.index("--") + 1 :] == training


JOB = shlex.split("run-1 --image i --accelerator tpu-v5p-slice --topology 2x2x4 --slices 2")


@pytest.mark.parametrize("claim", [(), ("--claim", "disk")])
def test_jobset_has_a_job_per_slice_and_a_pod_per_host_and_fails_on_final_codes(capsys, claim):
    flags = "--xla_a=true --xla_b=1"
    own = ("--env", f"LIBTPU_INIT_ARGS={flags}", "--env", "HF_HOME=/shared/hf")
    assert not jobset.main([*JOB, *own, *claim, "--", "a.yml", AWKWARD])
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    (slices,) = spec["replicatedJobs"]
    job = slices["template"]["spec"]
    assert (slices["replicas"], job["parallelism"], job["completions"]) == (2, 4, 4)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1, 2, 42, 130])
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert (job["backoffLimit"], spec["failurePolicy"]["maxRestarts"]) == (0, 20)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][2:] == ["maxpipe.supervise", "--", "python", "-m", "maxpipe.train"]
    assert container["args"] == ["a.yml", AWKWARD]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables["MAXPIPE_JOB"] == "$(JOBSET_NAMESPACE)/$(JOBSET_NAME)"
    assert variables["LIBTPU_INIT_ARGS"] == flags
    assert variables["HF_HOME"] == "/shared/hf"
    mounts = {"memory": "/dev/shm"} | ({"shared": "/shared"} if claim else {})
    assert {m["name"]: m["mountPath"] for m in container["volumeMounts"]} == mounts
    volumes = {item.pop("name"): item for item in pod["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert volumes["memory"] == {"emptyDir": {"medium": "Memory"}}


def test_jobset_with_a_bad_command_line_exits_with_2(capsys):
    flags = ("--topology 4", "--env 'A B=1'", "--chips-per-host 0", "--max-restarts -1")
    wrong = [[*JOB, *shlex.split(flag), "--", "a.yml"] for flag in flags]
    for words in (JOB, ["A_b", *JOB[1:], "--", "a.yml"], *wrong):
        with pytest.raises(SystemExit, match="2"):
            jobset.main(words)
        assert ": error: " in capsys.readouterr().err


def test_shell_scripts_pass_shellcheck():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if (shellcheck := shutil.which("shellcheck", path=path)) is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch"), SCRIPTS.parents[1] / ".ci" / "run"]
    command = [shellcheck, "-x", "-P", SCRIPTS, *scripts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
