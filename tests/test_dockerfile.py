"""Test the Dockerfile without Docker: its text, and its install steps in a fresh environment."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX_DEADLINE_SECONDS = 20


def instructions():
    """Return (instruction, arguments) of the Dockerfile, continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace(
        "\\\n", ""
    )
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


INSTRUCTIONS = instructions()


def arguments(name):
    """Return the arguments of every instruction called `name`."""
    return [text for instruction, text in INSTRUCTIONS if instruction == name]


(INSTALL,) = (step for step in arguments("RUN") if "pip install" in step)
IMAGE = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", arguments("FROM")[0])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned():
    """Return normalised package name -> pinned version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_dockerfile_has_a_pinned_slim_image_and_a_user_other_than_root():
    assert IMAGE
    order = [instruction for instruction, _ in INSTRUCTIONS]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert arguments("USER") == ["maxpipe"]
    assert not [step for step in arguments("RUN") if re.search(r"curl|wget|\beval\b", step)]


def test_constraints_pin_every_dependency_within_its_bounds():
    versions = pinned()
    for requirement in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        version = release(versions[name.lower()])
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
            assert (version >= release(bound)) if sign == ">=" else (version < release(bound)), (
                requirement
            )


def release(version):
    """Return a version as a list of numbers, for comparison."""
    return [int(part) for part in version.split(".")]


def test_dockerfile_copies_files_that_exist_and_are_not_ignored():
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for copy in arguments("COPY"):
        *sources, _ = copy.split()
        assert all((ROOT / source).exists() for source in sources)
        assert set(sources) <= allowed


def test_dockerfile_installs_a_known_extra_and_refuses_another(tmp_path):
    pip = tmp_path / "pip"
    pip.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    pip.chmod(0o755)
    for extra in ("cpu", "tpu", "cuda"):
        done = sh(INSTALL, EXTRA=extra, PATH=f"{tmp_path}:{os.environ['PATH']}")
        target = "." if extra == "cpu" else f".[{extra}]"
        assert json.loads(done.stdout) == ["install", "-c", "constraints.txt", target]
        assert extra == "cpu" or extra in PROJECT["optional-dependencies"]
    done = sh(INSTALL, EXTRA="gpu")
    assert done.returncode == 2
    assert "EXTRA=gpu is not one of cpu, tpu, cuda" in done.stderr


def sh(command, cwd=None, **environment):
    return subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.mark.grid
def test_dockerfile_steps_in_a_fresh_environment_install_and_train(tmp_path):
    python = shutil.which(f"python{IMAGE[1]}")
    if (
        python is None
        or subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode
    ):
        pytest.skip(f"the image's Python {IMAGE[1]} is not installed")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    environment = {"PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}", "EXTRA": "cpu"}
    probe = (
        f"timeout {INDEX_DEADLINE_SECONDS} pip download --no-deps --dest {tmp_path}"
        f" tqdm=={pinned()['tqdm']}"
    )
    if sh(probe, **environment).returncode:
        pytest.skip("no package index can be reached")
    build = tmp_path / "build"
    build.mkdir()
    for copy in arguments("COPY")[:2]:
        *sources, _ = copy.split()
        for source in sources:
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(
                ROOT / source, build / source
            )
    # Unlike the image, this keeps pip's cache, so that the index serves each package once.
    done = sh(INSTALL, cwd=build, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = json.loads(sh("pip list --format json", **environment).stdout)
    assert {
        p["name"].lower().replace("_", "-"): p["version"] for p in installed
    }.items() >= pinned().items()

    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (command,) = (" ".join(json.loads(a)) for a in arguments("ENTRYPOINT"))
    words = f"{command} configs/base.yml steps=2 eval.every=0 output_dir={tmp_path / 'runs'}"
    done = sh(words, cwd=tmp_path, **environment, PYTHONPATH="", XLA_FLAGS="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "base" / "checkpoints" / "2").is_dir()
