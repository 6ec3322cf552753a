"""Build the wheel, install it elsewhere, and run the README's first command from there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.training_process import TINY_MODEL

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "maxpipe", "configs")
SHORT = ("steps=2", "eval.every=0", "checkpoint.every=0", *TINY_MODEL)
SHORT += ("mesh.simulated_devices=2", "mesh.ici.fsdp=1")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel")
    directory = tmp_path_factory.mktemp("wheel")
    source = copy_sources(directory / "source")
    words = ["--no-index", "--no-deps", "--disable-pip-version-check", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "install", *words, "--target", directory / "site", source]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory / "site"


def copy_sources(directory):
    directory.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, directory / name)
    return directory


def run(site, directory, *words):
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("JAX_NUM_CPU_DEVICES", None)  # of the tests' own process
    command = [sys.executable, "-P", *words]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_first_command_of_the_readme_trains_from_an_installed_wheel(installed, tmp_path):
    run(installed, tmp_path, "-m", "maxpipe", "train", "configs/base.yml", *SHORT)
    assert (tmp_path / "runs" / "base" / "metrics.jsonl").exists()


def test_installed_wheel_has_its_own_configs_and_a_program_makes_the_run_of_the_command(
    installed, tmp_path
):
    def names(root):
        return {path.relative_to(root).as_posix() for path in root.rglob("*.yml")}

    assert names(installed / "maxpipe" / "configs") == names(ROOT / "configs")
    program = """
import sys, maxpipe
run = maxpipe.Run(maxpipe.load_config("base", *sys.argv[1:]))
import jax
print(run.directory, jax.device_count(), maxpipe.__file__)
"""
    directory, devices, file = run(installed, tmp_path, "-c", program, *SHORT).split()
    assert (directory, devices) == (str(tmp_path / "runs" / "base"), "2")
    assert file == str(installed / "maxpipe" / "__init__.py")
    words = ("-m", "maxpipe", "train", "llama3-8b", "steps=7", "--print-config")
    printed = run(installed, tmp_path, *words)
    assert f"{installed}/maxpipe/configs/models/llama3-8b.yml:" in printed


def test_editable_installation_is_found_from_the_folder_above_the_checkout(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel")
    checkout = copy_sources(tmp_path / "maxpipe")  # a directory of the package's name
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=checkout, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    program = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import maxpipe; "
    program += "print(maxpipe.__file__, maxpipe.__version__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert str(checkout / "maxpipe" / "__init__.py") in done.stdout, done.stderr
