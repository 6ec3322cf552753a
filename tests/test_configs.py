"""Test the files in configs/, and that all of them compile for the slices that are named.

The full compilations: pytest -m 'grid and tpu_aot' tests/test_configs.py. A preset takes two to ten
minutes on two idle cores, deepseek-v3 far longer; the workflow `grid` has a job for each.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers.compile_command import report_of, tpu_aot
from helpers.documentation import COMMANDS

from maxpipe.config import load, resolve
from maxpipe.config.slices import canonical_topology, num_devices
from maxpipe.data.loader import make_loader

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.yml"))
FOR_SLICES = sorted((ROOT / "configs").glob("*/*.yml"))
COMPILE = "python -m maxpipe.compile "
# What the documentation compiles for TPU slices, without files that it writes; it has other
# examples for simulated devices.
DOCUMENTED = [
    re.sub(r" --\S+ \S+", "", command.removeprefix(COMPILE)).split()
    for command in COMMANDS
    if command.startswith(COMPILE) and "topology=cpu" not in command
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_opens_with_its_command_and_names_its_run_after_the_file(path, monkeypatch):
    monkeypatch.chdir(path.parents[1])
    assert path.read_text().startswith(f"# python -m maxpipe.train configs/{path.name}\n")
    loaded = load(str(path))
    config = resolve(loaded, loaded.config.mesh.simulated_devices)
    assert config.run_name == path.stem
    make_loader(config, "train", [0]).close()


def test_configs_for_slices_resolve_on_a_slice_that_they_name():
    for path in FOR_SLICES:
        config = resolve_for_its_slice([str(path)])
        slice_names = re.findall(r"\bv\d[a-z]*-\d+\b", path.read_text())
        topologies = {canonical_topology(name) for name in slice_names}
        assert config.compile.topology in topologies, path


def test_documented_compile_commands_resolve_on_the_slices_that_they_name():
    assert DOCUMENTED
    for words in DOCUMENTED:
        resolve_for_its_slice(words)


def resolve_for_its_slice(words):
    loaded = load(str(ROOT / words[0]), words[1:])
    topology = canonical_topology(loaded.config.compile.topology)
    slices = loaded.config.compile.num_slices
    return resolve(loaded, num_devices(topology) * slices, slices)


@pytest.mark.grid
class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize("path", FOR_SLICES, ids=lambda path: path.stem)
    def test_config_for_a_slice_compiles_and_fits(self, tmp_path, path):
        report, _ = report_of(tmp_path, path)
        assert report["fits"]

    @pytest.mark.parametrize("words", DOCUMENTED, ids=" ".join)
    def test_documented_compile_command_compiles_and_fits(self, tmp_path, words):
        report, _ = report_of(tmp_path, *words)
        assert report["fits"]


def test_supported_versions_are_those_of_the_project_and_of_the_weekly_workflow():
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    row = re.search(r"^\| 0\.1\.0 \| (.*) \| (\S+) to (\S+) \| (.*) \|$", text, re.MULTILINE)
    pythons, oldest, newest = row[1].split(", "), row[2], row[3]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    above = f"0.{int(newest.removeprefix('0.')) + 1}"
    assert f"jax>={oldest},<{above}" in project["dependencies"]
    ends = [line.rpartition(" ")[2] for line in project["classifiers"]]
    assert [end for end in ends if re.fullmatch(r"3\.\d+", end)] == pythons
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    jobs = workflow["jobs"]["every-case"]["strategy"]["matrix"]["include"]
    assert {job["python"] for job in jobs} == {*pythons}
    assert {job["jax"] for job in jobs} == {f"jax=={oldest}", f"jax>={oldest}"}
