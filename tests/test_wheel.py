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
SHORT = (
    "steps=2",
    "eval.every=0",
    "checkpoint.every=0",
    *TINY_MODEL,
    "mesh.simulated_devices=2",
    "mesh.ici.fsdp=1",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a directory into which the wheel is installed, without its dependencies."""
    pytest.importorskip("setuptools", minversion="77", reason="builds the wheel")
    directory = tmp_path_factory.mktemp("wheel")
    source = copy_sources(directory / "source")
    offline = ("--no-index", "--no-deps", "--disable-pip-version-check")
    pip(*offline, "--no-build-isolation", "--target", directory / "site", source)
    return directory / "site"


def copy_sources(directory):
    directory.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, directory / name)
    return directory


def pip(*words):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def run(site, directory, *words):
    """Run `maxpipe` of an installed wheel in another directory."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-m", "maxpipe", *words]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_first_command_of_the_readme_trains_from_an_installed_wheel(installed, tmp_path):
    done = run(installed, tmp_path, "train", "configs/base.yml", *SHORT)
    assert done.returncode == 0, done.stderr
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
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *SHORT],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    directory, devices, file = done.stdout.split()
    assert (directory, devices) == (str(tmp_path / "runs" / "base"), "2")
    assert file == str(installed / "maxpipe" / "__init__.py")
    done = run(installed, tmp_path, "train", "llama3-8b", "steps=7", "--print-config")
    assert done.returncode == 0, done.stderr
    assert f"{installed}/maxpipe/configs/models/llama3-8b.yml:" in done.stdout


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
