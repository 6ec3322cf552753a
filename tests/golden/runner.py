"""Runs the train command several times in one process: `python tests/golden/runner.py JOBS`.

Starting JAX takes longer than most of these runs, and a process of their own keeps flags and
devices apart from those of the caller. JOBS is a JSON file, {name: words of the command}; what a
run prints goes to `<name>.log`.
"""

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from helpers.quick_compile import QUICK_COMPILE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Variables of the caller that could change a result, or how processes find each other.
_FOREIGN = ("JAX_", "XLA_", "PJRT_", "NPROC", "LIBTPU_", "SLURM_", "OMPI_", "MAXPIPE_", "TPU_")


def run_all(jobs: Mapping[str, Sequence[str]], directory: Path) -> None:
    """Run every job in one child process, whose working directory is `directory`.

    A job that fails does not stop the others; `log_of` says why it failed.
    """
    file = directory / "jobs.json"
    file.write_text(json.dumps(jobs))
    command = [sys.executable, __file__, str(file)]
    with (directory / "runner.log").open("w") as log:
        subprocess.run(
            command, cwd=directory, env=environment(), stdout=log, stderr=log, timeout=1200
        )


def log_of(name: str, directory: Path) -> str:
    logs = [directory / f"{name}.log", directory / "runner.log"]
    return "\n".join(log.read_text()[-4000:] for log in logs if log.exists())


def environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    paths = [str(ROOT), str(ROOT / "tests"), inherited.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, paths))
    return inherited | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "NPROC": "64",  # how many threads share a matrix product may change its last bits
        "XLA_FLAGS": " ".join(QUICK_COMPILE),
    }


if __name__ == "__main__":
    for name, words in json.loads(Path(sys.argv[1]).read_text()).items():
        with Path(f"{name}.log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
            sys.argv = ["train", *words]
            try:
                runpy.run_module("maxpipe.train", run_name="__main__", alter_sys=True)
            except SystemExit as end:
                print(f"exit code {end.code}")
            except Exception:
                traceback.print_exc()
