"""Test the launch scripts with fake commands on the PATH that record their calls."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers.training_process import inherited

SCRIPTS = Path(__file__).parents[2] / "scripts" / "launch"
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
    """Fake commands that record their calls and print set answers."""

    def __init__(self, directory):
        self.directory = directory
        self.notes, self.answers = directory / "notes", directory / "answers"
        self.notes.touch()
        self.answer({})

    def add(self, name):
        program = self.directory / name
        values = {"python": sys.executable, "notes": str(self.notes), "answers": str(self.answers)}
        program.write_text(NOTES_AND_ANSWERS.format(**values))
        program.chmod(0o755)

    def answer(self, answers):
        """Set {part of a call: answers in turn}; the last answer repeats."""
        self.answers.write_text(json.dumps(answers))

    @property
    def calls(self):
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    def run(self, *words, **environment):
        path = f"{self.directory}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            list(map(str, words)),
            env={
                **{name: v for name, v in os.environ.items() if name != "PYTHON"},
                "PATH": path,
                "POLL_SECONDS": "0",
                "TMPDIR": str(self.directory),
                **environment,
            },
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def fakes(tmp_path):
    return Fakes(tmp_path)


def words_of(line):
    """Split a command as the scripts print it into its words."""
    shown = line.removeprefix("+ ")
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {shown}"], capture_output=True, text=True, check=True
    )
    return printed.stdout.split("\0")[:-1]


class TestLocal:
    def test_local_dry_run_shows_every_process(self, fakes):
        done = fakes.run(SCRIPTS / "local.sh", "--dry-run", "3", "a.yml", AWKWARD, PYTHON="python")
        lines = done.stderr.splitlines()
        assert len(lines) == 3
        for index, line in enumerate(lines):
            words = words_of(line)
            assert words[-3:] == ["maxpipe.train", "a.yml", AWKWARD]
            assert f"JAX_PROCESS_ID={index}" in words
            assert "JAX_NUM_PROCESSES=3" in words

    @pytest.mark.parametrize("codes", ["0 0", "42 42", "134 137"])
    def test_local_exits_with_the_code_of_supervisor_0(self, fakes, codes):
        program = fakes.directory / "python"
        program.write_text(
            '#!/bin/bash\n[ "$1" = -c ] && echo 1 && exit\nc=($CODES); exit ${c[JAX_PROCESS_ID]}\n'
        )
        program.chmod(0o755)
        done = fakes.run(SCRIPTS / "local.sh", "2", "a.yml", CODES=codes, PYTHON=str(program))
        assert done.returncode == int(codes.split()[0]), done.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_local_with_a_signal_forwards_it_once_to_all_and_waits(self, fakes, number):
        program = fakes.directory / "python"
        program.write_text(
            f"#!{sys.executable}\n"
            "import os, signal, sys, time\n"
            "if sys.argv[1] == '-c': sys.exit(print(1))\n"
            "def end(number, frame):\n"
            "    print('got', number, flush=True); time.sleep(0.3); sys.exit(75)\n"
            "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(n, end)\n"
            "print('ready', flush=True); time.sleep(60)\n"
        )
        program.chmod(0o755)
        with inherited(signal.SIGHUP, signal.SIG_DFL):
            process = subprocess.Popen(
                [SCRIPTS / "local.sh", "2", "a.yml"],
                env={
                    **os.environ,
                    "PYTHON": str(program),
                    "LOG_DIR": str(fakes.directory / "logs"),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert process.stdout.readline() == "ready\n"
        log = fakes.directory / "logs" / "local-1.log"  # the directory is made
        until = time.monotonic() + 30
        while not (log.exists() and log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.killpg(process.pid, number)  # as a terminal does
        assert process.communicate(timeout=30)[0] == f"got {int(number)}\n"
        assert log.read_text() == f"ready\ngot {int(number)}\n"
        assert process.returncode == 75

    @pytest.mark.parametrize("words", [[], ["2"], ["0", "a.yml"], ["two", "a.yml"]])
    def test_local_with_a_bad_command_line_exits_with_2(self, fakes, words):
        done = fakes.run(SCRIPTS / "local.sh", *words)
        assert done.returncode == 2
        assert "usage: local.sh" in done.stderr


class TestTpuVm:
    STATE = "state.state"
    COUNT = "nodeCount"

    @pytest.fixture
    def tpu_vm(self, fakes):
        """Return a function that runs tpu_vm.sh with a fake gcloud."""
        fakes.add("gcloud")
        return lambda *words: fakes.run(SCRIPTS / "tpu_vm.sh", "--zone", "z1", *words)

    def commands(self, fakes):
        """Return gcloud's calls besides `describe`, without `gcloud compute tpus`."""
        assert all(
            call[:3] == ["gcloud", "compute", "tpus"] and "--zone" in call for call in fakes.calls
        )
        return [call[3:] for call in fakes.calls if "describe" not in call]

    def test_create_requests_once_and_waits_until_active(self, fakes, tpu_vm):
        fakes.answer({self.STATE: ["", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"]})
        done = tpu_vm("create", "pod", "--type", "v5p-16", "--spot", "--project", "p")
        assert done.returncode == 0, done.stderr
        (call,) = self.commands(fakes)
        assert call[:5] == ["queued-resources", "create", "pod", "--node-id", "pod"]
        assert {"v5p-16", "v2-alpha-tpuv5", "--spot", "--project"} <= set(call)

    def test_create_of_an_active_resource_does_nothing(self, fakes, tpu_vm):
        fakes.answer({self.STATE: ["ACTIVE"]})
        assert tpu_vm("create", "pod", "--type", "v5p-16").returncode == 0
        assert self.commands(fakes) == []

    def test_create_of_a_failed_resource_exits_with_2(self, fakes, tpu_vm):
        fakes.answer({self.STATE: ["FAILED"]})
        done = tpu_vm("create", "pod", "--type", "v5p-16")
        assert done.returncode == 2
        assert "pod is FAILED" in done.stderr

    def test_setup_installs_on_every_worker_of_every_slice(self, fakes, tpu_vm):
        fakes.answer({self.COUNT: ["2"]})
        fakes.add("git")
        done = tpu_vm("setup", "pod")
        assert done.returncode == 0, done.stderr
        calls = [call[1:] for call in fakes.calls if call[0] == "gcloud" and "describe" not in call]
        assert sorted(
            (call[3], node)
            for call in calls
            for node in ("pod-0", "pod-1")
            if node in " ".join(call)
        ) == [
            ("scp", "pod-0"),
            ("scp", "pod-1"),
            ("ssh", "pod-0"),
            ("ssh", "pod-1"),
        ]
        assert all("--worker=all" in call for call in calls)

    def test_run_called_twice_starts_the_given_words_and_flags_once(
        self, fakes, tpu_vm, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_a=1 {AWKWARD}")
        monkeypatch.setenv("MAXPIPE_JOB", AWKWARD)
        assert tpu_vm("run", "pod", "--", "a.yml", AWKWARD).returncode == 0
        (call,) = self.commands(fakes)
        remote = call[call.index("--command") + 1]
        worker = tmp_path / "worker"
        python = worker / "maxpipe" / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(
            '#!/bin/bash\nprintf "%s\\0" "$@" "$LIBTPU_INIT_ARGS" "$MAXPIPE_JOB" >>words; '
            "echo . >>attempts; sleep 1; exit 7\n"
        )
        python.chmod(0o755)
        outputs = [
            subprocess.run(
                ["bash", "-c", remote], cwd=worker, capture_output=True, text=True, check=True
            ).stdout
            for _ in range(2)
        ]
        assert outputs == ["", "already running\n"]
        exit_code = worker / "maxpipe" / "exit_code"
        until = time.monotonic() + 20
        while not (exit_code.exists() and exit_code.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert exit_code.read_text() == "7\n"
        assert (worker / "maxpipe" / "attempts").read_text() == ".\n"
        words = (worker / "maxpipe" / "words").read_text().split("\0")[:-1]
        training = [".venv/bin/python", "-m", "maxpipe.train", "a.yml", AWKWARD]
        variables = [f"--xla_a=1 {AWKWARD}", AWKWARD]
        assert words == ["-m", "maxpipe.supervise", "--", *training, *variables]
        assert not list(tmp_path.rglob("pwned"))

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ({}, "not started"),
            ({"pid": str(os.getpid())}, "running"),
            ({"pid": "", "exit_code": "75"}, "ended with exit code 75"),
            ({"pid": ""}, "ended without an exit code"),
        ],
    )
    def test_status_says_on_every_worker_how_the_training_is(
        self, fakes, tpu_vm, tmp_path, files, said
    ):
        assert tpu_vm("status", "pod").returncode == 0
        (call,) = self.commands(fakes)
        if files:
            (tmp_path / "maxpipe").mkdir()
        for name, text in files.items():
            (tmp_path / "maxpipe" / name).write_text(f"{text}\n")
        remote = ["bash", "-c", call[call.index("--command") + 1]]
        done = subprocess.run(remote, cwd=tmp_path, capture_output=True, text=True)
        assert (done.stdout, done.stderr, done.returncode) == (f"{said}\n", "", 0)

    def test_resume_of_a_preempted_resource_recreates_it_and_runs(self, fakes, tpu_vm):
        fakes.add("git")
        fakes.answer({self.STATE: ["SUSPENDED", "SUSPENDED", "", "ACTIVE"]})
        done = tpu_vm("resume", "pod", "--type", "v5p-16", "--", "a.yml")
        assert done.returncode == 0, done.stderr
        actions = [
            call[4] for call in fakes.calls if call[0] == "gcloud" and "describe" not in call
        ]
        assert actions == ["delete", "create", "scp", "ssh", "ssh"]

    def test_delete_of_a_missing_resource_does_nothing(self, fakes, tpu_vm):
        assert tpu_vm("delete", "pod").returncode == 0
        assert self.commands(fakes) == []

    @pytest.mark.parametrize(
        "action", ["create", "setup", "run", "status", "logs", "resume", "delete"]
    )
    def test_tpu_vm_dry_run_calls_nothing(self, fakes, tpu_vm, action):
        done = tpu_vm(
            action, "pod", "--dry-run", "--type", "v5p-16", "--slices", "2", "--", "a.yml"
        )
        assert done.returncode == 0, done.stderr
        assert fakes.calls == []
        assert "+ gcloud compute tpus" in done.stderr

    def test_tpu_vm_prints_its_help(self, tpu_vm):
        done = tpu_vm("--help")
        assert (done.returncode, "create NAME --zone" in done.stdout) == (0, True), done.stderr

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["run", "pod"], "what to train is missing"),
            (["create", "pod"], "--type is missing"),
            (["create", "pod", "--type", "v9-8"], "no default for --type v9-8"),
            (["create", "pod;ls", "--type", "v4-8"], "lower-case letters"),
            (["create", "pod", "--slices", "x"], "--slices is not a number"),
            (["fly", "pod"], "there is no command fly"),
            (["create"], "usage"),
        ],
    )
    def test_tpu_vm_with_a_bad_command_line_exits_with_2(self, fakes, tpu_vm, words, message):
        done = tpu_vm(*words)
        assert done.returncode == 2
        assert message in done.stderr
        assert self.commands(fakes) == []


class TestSlurm:
    @pytest.fixture
    def slurm(self, fakes):
        """Return a function that runs a job whose supervisors exit with a given code."""
        fakes.add("scontrol")
        (fakes.directory / "srun").write_text('#!/bin/bash\nshift\n"$@"\n')
        (fakes.directory / "python").write_text(
            '#!/bin/bash\nprintf "%s\\0" "$MAXPIPE_SECRET" "$@" >"$OUT"; exit $CODE\n'
        )
        for name in ("srun", "python"):
            (fakes.directory / name).chmod(0o755)

        def run(code, *words, **environment):
            variables = {
                "CODE": str(code),
                "OUT": str(fakes.directory / "words"),
                "SLURM_JOB_ID": "9",
            }
            return fakes.run("bash", SCRIPTS / "slurm.sbatch", *words, **variables, **environment)

        return run

    @pytest.mark.parametrize(("code", "again"), [(0, 0), (75, 1), (134, 1), (42, 0), (1, 0)])
    def test_slurm_job_with_a_retryable_code_is_requeued(self, fakes, slurm, code, again):
        done = slurm(code, "a.yml", AWKWARD)
        assert done.returncode == code, done.stderr
        assert fakes.calls == [["scontrol", "requeue", "9"]] * again
        secret, *words = (fakes.directory / "words").read_text().split("\0")[:-1]
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert words[:2] == ["-m", "maxpipe.supervise"]
        training = ["python", "-m", "maxpipe.train", "a.yml", AWKWARD]
        assert words[words.index("--") + 1 :] == training

    def test_slurm_job_after_20_restarts_is_not_requeued(self, fakes, slurm):
        assert slurm(75, "a.yml", SLURM_RESTART_COUNT="20").returncode == 75
        assert fakes.calls == []

    def test_slurm_dry_run_shows_the_command_only(self, fakes, slurm):
        done = slurm(0, "--dry-run", "a.yml")
        assert done.returncode == 0
        assert "+ srun" in done.stderr
        assert not (fakes.directory / "words").exists()


class TestJobSet:
    WORDS = (
        "run-1",
        "--image",
        "i",
        "--accelerator",
        "tpu-v5p-slice",
        "--topology",
        "2x2x4",
        "--slices",
        "2",
    )

    def jobset(self, fakes, *words):
        return fakes.run(sys.executable, SCRIPTS / "gke" / "jobset.py", *words)

    def test_jobset_has_one_job_per_slice_and_one_pod_per_host(self, fakes):
        done = self.jobset(fakes, *self.WORDS, "--claim", "disk", "--", "a.yml", AWKWARD)
        spec = yaml.safe_load(done.stdout)["spec"]
        (slices,) = spec["replicatedJobs"]
        job = slices["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        assert (slices["replicas"], job["parallelism"], job["completions"]) == (2, 4, 4)
        assert container["command"][2:] == [
            "maxpipe.supervise",
            "--",
            "python",
            "-m",
            "maxpipe.train",
        ]
        assert container["args"] == ["a.yml", AWKWARD]
        assert container["resources"]["limits"] == {"google.com/tpu": 4}

    def test_jobset_names_job_and_own_variables(self, fakes):
        flags = "--xla_a=true --xla_b=1"
        words = (*self.WORDS, "--env", f"LIBTPU_INIT_ARGS={flags}", "--env", "HF_HOME=/shared/hf")
        spec = yaml.safe_load(self.jobset(fakes, *words, "--", "a.yml").stdout)["spec"]
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        variables = {item.pop("name"): item for item in pod["containers"][0]["env"]}
        assert variables["MAXPIPE_JOB"]["value"] == "$(JOBSET_NAMESPACE)/$(JOBSET_NAME)"
        assert variables["LIBTPU_INIT_ARGS"]["value"] == flags
        assert variables["HF_HOME"]["value"] == "/shared/hf"

    @pytest.mark.parametrize(
        ("words", "mounts"),
        [
            ((), {"memory": "/dev/shm"}),
            (("--claim", "disk"), {"memory": "/dev/shm", "shared": "/shared"}),
        ],
    )
    def test_jobset_has_the_host_memory_for_replicas_and_the_claim(self, fakes, words, mounts):
        done = self.jobset(fakes, *self.WORDS, *words, "--", "a.yml")
        spec = yaml.safe_load(done.stdout)["spec"]
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert {item["name"]: item["mountPath"] for item in container["volumeMounts"]} == mounts
        volumes = {item.pop("name"): item for item in pod["volumes"]}
        assert volumes.keys() == mounts.keys()
        assert volumes["memory"] == {"emptyDir": {"medium": "Memory"}}

    def test_jobset_fails_on_final_codes_and_restarts_on_others(self, fakes):
        spec = yaml.safe_load(self.jobset(fakes, *self.WORDS, "--", "a.yml").stdout)["spec"]
        job = spec["replicatedJobs"][0]["template"]["spec"]
        (rule,) = job["podFailurePolicy"]["rules"]
        assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1, 2, 42, 130])
        assert spec["failurePolicy"]["rules"] == [
            {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ]
        assert (job["backoffLimit"], spec["failurePolicy"]["maxRestarts"]) == (0, 20)

    @pytest.mark.parametrize(
        "words",
        [
            WORDS,
            ("A_b", *WORDS[1:], "--", "a.yml"),
            (*WORDS, "--topology", "4", "--", "a.yml"),
            (*WORDS, "--env", "A B=1", "--", "a.yml"),
            (*WORDS, "--chips-per-host", "0", "--", "a.yml"),
            (*WORDS, "--slices", "0", "--", "a.yml"),
            (*WORDS, "--max-restarts", "-1", "--", "a.yml"),
            (*WORDS, "--grace-seconds", "-1", "--", "a.yml"),
        ],
    )
    def test_jobset_with_a_bad_command_line_exits_with_2(self, fakes, words):
        done = self.jobset(fakes, *words)
        assert done.returncode == 2
        assert "jobset.py: error: " in done.stderr


def test_shell_scripts_pass_shellcheck():
    shellcheck = shutil.which(
        "shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch"), SCRIPTS.parents[1] / ".ci" / "run"]
    done = subprocess.run(
        [shellcheck, "-x", "-P", SCRIPTS, *scripts], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
