"""The examples, and the script of the page on own models, do what they say."""

import ast
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax
import pytest
import yaml
from helpers.documentation import titled_files
from helpers.runs import losses
from helpers.training_process import TINY_MODEL

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(script, *words) -> what it prints, on the devices that this process has."""
    update = jax.config.update

    def keeping_devices(name, value):
        if name != "jax_num_cpu_devices":
            update(name, value)

    def _run(script, *words):
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        monkeypatch.setattr(jax.config, "update", keeping_devices)
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return _run


def losses_of(printed):
    return [float(value) for value in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]


def test_gpipe_example_halves_its_loss(run):
    words = ["--stages", "2", "--microbatches", "4", "--steps", "40"]
    first, *_, last = losses_of(run(EXAMPLES / "gpipe.py", *words))
    assert last < first / 2


def test_own_model_mpmd_example_on_stages_of_different_sizes_halves_its_loss(run):
    words = ["--schedule", "zb_h1", "--devices-per-stage", "2", "1", "1", "--steps", "60"]
    printed = run(EXAMPLES / "own_model_mpmd.py", *words)
    differences = re.findall(r"^largest difference of .*: (.+)$", printed, re.MULTILINE)
    assert len(differences) == 2
    assert max(map(float, differences)) < 1e-5
    assert re.search(r"^stage 0 \(devices: 2\) has shared$", printed, re.MULTILINE)
    first, *_, last = losses_of(printed)
    assert last < first / 2


def test_script_of_the_page_on_own_models_trains(run, tmp_path):
    script = tmp_path / "own_model.py"
    script.write_text(titled_files("docs/own_models.md")[script.name], encoding="utf-8")
    first, last = losses_of(run(script))
    assert last < first


def test_train_in_python_example_trains_on_its_own_devices_and_writes(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    words = [*TINY_MODEL, "steps=3", "eval.every=0", f"output_dir={tmp_path}"]
    command = [sys.executable, EXAMPLES / "train_in_python.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "devices     4 x cpu simulated on one machine" in done.stdout
    assert re.search(r"^lockstep_1f1b +2 .* scheduled$", done.stdout, re.MULTILINE)
    (called,) = re.findall(r"^callback +step 3: loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(called) == round(losses(tmp_path / "base")[3][0], 4)
    continued = re.search(r"after 'def ': (\[.*\])", done.stdout)[1]
    assert len(ast.literal_eval(continued)) == 5


@pytest.mark.slow
def test_same_loss_example_draws_curves_of_four_engines_that_agree(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = [*TINY_MODEL, "data.sequence_length=16", "steps=3"]
    devices = ["mesh.simulated_devices=0", "mesh.ici.data=2"]  # the eight of this process
    printed = run(EXAMPLES / "same_loss.py", *size, *devices)
    assert (
        float(re.search(r"^largest difference of a loss: (\S+)$", printed, re.MULTILINE)[1]) < 1e-5
    )
    runs = [tmp_path / "runs" / f"same_loss-{name}" for name in SAME_LOSS]
    engines = [
        yaml.safe_load((run / "config.yml").read_text())["pipeline"]["engine"] for run in runs
    ]
    assert engines == [*SAME_LOSS.values()]
    drawn = ElementTree.parse(tmp_path / "same_loss.svg").iter(
        "{http://www.w3.org/2000/svg}polyline"
    )
    assert [len(line.get("points").split()) for line in drawn] == [3] * 4


SAME_LOSS = {
    "sequential": "sequential",
    "lockstep_1f1b": "scheduled",
    "circular": "circular",
    "zb_v": "mpmd",
}


# The example with a model that compiles soon.
SMALL_LLAMA = """
import runpy, sys, transformers
whole = transformers.LlamaConfig
small = dict(vocab_size=320, hidden_size=36, intermediate_size=64, num_hidden_layers=4)
transformers.LlamaConfig = lambda **keys: whole(**keys | small)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_there_and_back_example_ends_with_the_logits_of_transformers(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs the extra `hf-test`")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    path = str(EXAMPLES / "there_and_back.py")
    command = [sys.executable, "-c", SMALL_LLAMA, path, "steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    difference, largest = re.search(r"logits: (\S+) of (\S+)$", done.stdout.strip()).groups()
    assert float(difference) < 1e-5 * float(largest)
