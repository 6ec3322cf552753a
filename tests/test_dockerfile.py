"""Test the Dockerfile without Docker: its text, and its install step with another pip."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions():
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace(
        "\\\n", ""
    )
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


INSTRUCTIONS = instructions()


def arguments(name):
    return [text for instruction, text in INSTRUCTIONS if instruction == name]


_, INSTALL = (step for step in arguments("RUN") if re.search("pip (wheel|install)", step))
IMAGE = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", arguments("FROM")[1])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_dockerfile_has_a_pinned_slim_image_and_a_user_other_than_root():
    assert arguments("FROM") == [f"{IMAGE[0]} AS build", IMAGE[0]]
    order = [instruction for instruction, _ in INSTRUCTIONS]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert arguments("USER") == ["maxpipe"]
    assert not [step for step in arguments("RUN") if re.search(r"curl|wget|\beval\b", step)]


def test_constraints_pin_every_dependency_within_its_bounds():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in PROJECT["dependencies"]:
        name, bounds = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        version = release(versions[name.lower()])
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
            assert (version >= release(bound)) if sign == ">=" else (version < release(bound)), (
                requirement
            )


def release(version):
    return [int(part) for part in version.split(".")]


def test_dockerfile_copies_files_that_exist_and_are_not_ignored():
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for copy in arguments("COPY"):
        *sources, _ = copy.split()
        if sources[0] != "--from=build":
            assert all((ROOT / source).exists() for source in sources)
            assert set(sources) <= allowed


def test_dockerfile_installs_a_known_extra_and_refuses_another(tmp_path):
    pip = tmp_path / "pip"
    pip.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    pip.chmod(0o755)
    wheel = "dist/maxpipe-0.1.0-py3-none-any.whl"
    (tmp_path / "dist").mkdir()
    (tmp_path / wheel).touch()
    for extra in ("cpu", "tpu", "cuda"):
        done = sh(INSTALL, tmp_path, EXTRA=extra, PATH=f"{tmp_path}:{os.environ['PATH']}")
        target = wheel if extra == "cpu" else f"{wheel}[{extra}]"
        assert json.loads(done.stdout) == ["install", "-c", "constraints.txt", target]
        assert extra == "cpu" or extra in PROJECT["optional-dependencies"]
    done = sh(INSTALL, EXTRA="gpu")
    assert done.returncode == 2
    assert "EXTRA=gpu is not one of cpu, tpu, cuda" in done.stderr


def sh(command, cwd=None, **environment):
    words, environment = ["sh", "-c", command], {**os.environ, **environment}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
