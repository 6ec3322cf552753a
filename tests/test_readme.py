"""Every command in the README is run, in its order; what is shortened or left out says so here."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from maxpipe import compile as compile_command
from maxpipe import generate, schedule, train
from maxpipe.checkpoint import __main__ as checkpoint
from maxpipe.config import load
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.options import OPTIONS
from maxpipe.data import __main__ as data
from maxpipe.supervision.failure import FAILED
from maxpipe.supervision.signals import INTERRUPTED, PREEMPTED
from maxpipe.supervision.watchdog import HUNG
from maxpipe.training.loop import DIVERGED

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "README.md").read_text()
MAINS = {
    "maxpipe.train": train.main,
    "maxpipe.generate": generate.main,
    "maxpipe.compile": compile_command.main,
    "maxpipe.schedule": schedule.main,
    "maxpipe.checkpoint": checkpoint.main,
    "maxpipe.data": data.main,
}
FIRST_RUN = "python -m maxpipe.train configs/base.yml"
# The first run as it is, but for its size and for the devices that are there.
SMALL = [
    "steps=2",
    "eval.every=2",
    "eval.batches=1",
    "checkpoint.every=2",
    "model.embed_dim=16",
    "model.num_query_heads=2",
    "model.num_kv_heads=2",
    "model.mlp_dim=32",
    "mesh.simulated_devices=0",
    "mesh.ici.fsdp=4",
]
# Checked as far as the configuration goes: each is a run or a compilation of minutes, and has tests
# of its own.
CONFIGURATION_ONLY = {"maxpipe.train", "maxpipe.compile"}
MORE_WORDS = {"maxpipe.data": ["--seconds=0.05"], "maxpipe.generate": ["--max-tokens=20"]}
LAUNCH, BENCHMARK = "scripts/launch", "scripts/benchmark"
TPU_VM = f"bash {LAUNCH}/tpu_vm.sh create name --zone z --type v5p-8 --dry-run"
SCRIPTS = {
    f"{LAUNCH}/local.sh": ["bash", f"{LAUNCH}/local.sh", "--dry-run", "2", "configs/base.yml"],
    f"{LAUNCH}/tpu_vm.sh": TPU_VM.split(),
    f"{BENCHMARK}/compare_maxtext.py": [
        sys.executable,
        f"{BENCHMARK}/compare_maxtext.py",
        "--help",
    ],  # needs MaxText
    "sbatch": ["bash", "-n", f"{LAUNCH}/slurm.sbatch"],
}
# Installing, testing and drawing are other programs' affair.
OTHERS = {"pip", "pytest", "tensorboard", "docker"}


def fences(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def commands():
    """All lines of shell fences, and inline code that is a command; without comments."""
    lines = [line for fence in fences("bash") for line in fence.splitlines()]
    lines += re.findall(r"`(python (?:-m|scripts/)[^`]*)`", TEXT)
    found = (shlex.join(shlex.split(line, comments=True)) for line in lines)
    return [*dict.fromkeys(command for command in found if command)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An empty directory with the repository's files, in which the first run has been made."""
    directory = tmp_path_factory.mktemp("readme")
    for name in (
        "configs",
        "scripts",
        "examples",
        "README.md",
        "pyproject.toml",
        "docs",
        "maxpipe",
    ):
        (directory / name).symlink_to(REPOSITORY / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert train.main([*FIRST_RUN.split()[3:], *SMALL]) == 0
        yield directory


def test_the_first_run_is_a_command_of_the_readme():
    assert FIRST_RUN in commands()


@pytest.mark.parametrize("command", commands())
def test_command(command, place, capfd):
    words = shlex.split(command)
    named = [word for word in words if re.match(r"(configs|scripts|examples|docs)/", word)]
    assert [word for word in named if not (place / word).exists()] == []
    if words[:2] == ["python", "-m"]:
        run_module(words[2], words[3:])
    elif script := next((word for word in words[:2] if word in SCRIPTS), None):
        run(*SCRIPTS[script])
    elif words[0] == "python":
        run(sys.executable, *words[1:])
    else:
        assert words[0] in OTHERS, f"say in this file how to run: {command}"


def run_module(module, words):
    asks = {"--help", "--print-config"} & set(words)
    more = (
        ["--print-config"]
        if module in CONFIGURATION_ONLY and not asks
        else MORE_WORDS.get(module, [])
    )
    try:
        code = MAINS[module]([*words, *more])
    except SystemExit as end:
        code = end.code
    assert not code


def run(*words):
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "code", [FAILED, CONFIG_ERROR, DIVERGED, PREEMPTED, HUNG, INTERRUPTED, 134]
)
def test_every_exit_code_has_a_meaning_and_a_remedy(code):
    table, _, troubleshooting = (
        TEXT.partition("## How a run ends")[2].partition("## Adding to it")[0].partition("###")
    )
    assert re.search(rf"^\| {code} \| .+ \| .+ \|$", table, re.MULTILINE)
    assert f"- **{code}**" in troubleshooting


def test_keys_that_troubleshooting_names_exist():
    section = TEXT.partition("### Troubleshooting")[2].partition("\n## ")[0]
    keys = {
        key
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[=`]", section)
        if key != "metrics.jsonl"
    }
    assert len(keys) > 5
    assert keys <= set(OPTIONS)


def test_extras_that_are_installed_exist():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"\.\[(\w+)\]", TEXT))
    assert named
    assert named <= set(extras)


@pytest.mark.parametrize("text", fences("yaml"))
def test_yaml_is_a_configuration(text, tmp_path):
    shutil.copy(REPOSITORY / "configs" / "base.yml", tmp_path)
    (tmp_path / "readme.yml").write_text(f"base: base.yml\n{text}")
    load(str(tmp_path / "readme.yml"))


def test_files_and_keys_that_it_names_exist():
    files = set(re.findall(r"`((?:maxpipe|scripts|examples|configs|tests)/[\w/.-]+)`", TEXT))
    assert [name for name in files if "NAME" not in name and not (REPOSITORY / name).exists()] == []
    places = [Path(name).parent for name in files if "NAME" in name]
    assert places
    assert [place for place in places if not (REPOSITORY / place).is_dir()] == []
