"""The example, in a process of its own, makes its devices, trains, and uses the model."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from helpers.runs import losses
from helpers.training_process import TINY_MODEL

SCRIPT = Path(__file__).parents[2] / "examples" / "train_in_python.py"


def test_train_in_python_example_trains_on_its_own_devices_and_writes(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    words = [*TINY_MODEL, "steps=3", "eval.every=0", f"output_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "devices     4 x cpu simulated on one machine" in done.stdout
    assert re.search(r"^lockstep_1f1b +2 .* scheduled$", done.stdout, re.MULTILINE)
    (called,) = re.findall(r"^callback +step 3: loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(called) == round(losses(tmp_path / "base")[3][0], 4)
    continued = re.search(r"after 'def ': (\[.*\])", done.stdout)[1]
    assert len(ast.literal_eval(continued)) == 5
