"""Train the same model in MaxText and in maxpipe, in turns on this machine.

    python scripts/benchmark/compare_maxtext.py PYTHON [--case interleaved one_repeat fsdp]
        [--ours PYTHON ...] [--rounds 1] [--steps 6] [--json FILE]

PYTHON is a Python 3.12 with MaxText, which runs both trainers, so that JAX and libtpu are the same
(`--ours` names further Pythons, which run maxpipe with their own JAX):

    python3.12 -m venv VENV && VENV/bin/pip install uv
    VENV/bin/uv pip install --python VENV/bin/python --compile-bytecode 'maxtext[tpu]==0.2.5' \\
        --resolution=lowest

Each training command runs as its own process on 8 simulated CPU devices: 8 layers, 4 heads of 64,
32 x 256 tokens, float32, full rematerialisation, synthetic data. Reported are seconds from the
command to the end of the first step, CPU seconds a step (user and system; the first step is left
out), and the peak of resident memory: medians over the runs and, of CPU seconds, the lowest and the
highest run. Ratios are MaxText over maxpipe, of the same round for their range. Then both compile a
larger model in bfloat16 for 8 v5p chips, with the compilers' figures for the memory of one device.
Linux only, since CPU time is read from /proc.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from process_time import cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
MAXTEXT = "0.2.5"
DEVICES = 8
MIB = 2**20
# Lines that end a step; both trainers write them when its loss has been computed.
STEP_LINES = {"maxtext": re.compile(r"completed step: \d+"), "maxpipe": re.compile(r"^step +\d+/")}

# Every case as (words for MaxText, words for maxpipe).
CASES = {
    "interleaved": (
        (
            "ici_pipeline_parallelism=4",
            "ici_fsdp_parallelism=2",
            "num_pipeline_microbatches=8",
            "num_layers_per_pipeline_stage=1",
            "num_pipeline_repeats=2",
        ),
        (
            "mesh.ici.stage=4",
            "mesh.ici.fsdp=2",
            "pipeline.num_microbatches=8",
            "pipeline.num_repeats=2",
            "pipeline.schedule=lockstep_1f1b",
        ),
    ),
    "one_repeat": (
        (
            "ici_pipeline_parallelism=4",
            "ici_fsdp_parallelism=2",
            "num_pipeline_microbatches=8",
            "num_layers_per_pipeline_stage=2",
            "num_pipeline_repeats=1",
        ),
        (
            "mesh.ici.stage=4",
            "mesh.ici.fsdp=2",
            "pipeline.num_microbatches=8",
            "pipeline.num_repeats=1",
            "pipeline.schedule=lockstep_1f1b",
        ),
    ),
    "fsdp": (
        ("ici_fsdp_parallelism=8",),
        (
            "mesh.ici.stage=1",
            "mesh.ici.fsdp=8",
            "pipeline.num_microbatches=1",
            "pipeline.num_repeats=-1",
        ),
    ),
}
MAXTEXT_SMALL = (
    "base_emb_dim=256",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "head_dim=64",
    "base_mlp_dim=1024",
    "base_num_decoder_layers=8",
    "vocab_size=1024",
    "max_target_length=256",
    "per_device_batch_size=4",
    "dtype=float32",
    "weight_dtype=float32",
    "attention=dot_product",
)
MAXPIPE_SMALL = (
    "model.embed_dim=256",
    "model.num_query_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.mlp_dim=1024",
    "model.num_layers=8",
    "model.vocab_size=1024",
    "data.sequence_length=256",
    "data.global_batch_size=32",
    "model.dtype=float32",
)
# 4 stages of 2 repeats of 2 layers x 2 fsdp, 32 microbatches of 2 sequences.
MAXTEXT_V5P = (
    "base_emb_dim=2048",
    "base_num_query_heads=16",
    "base_num_kv_heads=16",
    "head_dim=128",
    "base_mlp_dim=8192",
    "base_num_decoder_layers=16",
    "vocab_size=32768",
    "max_target_length=2048",
    "per_device_batch_size=8",
    "dtype=bfloat16",
    "weight_dtype=float32",
    "ici_pipeline_parallelism=4",
    "ici_fsdp_parallelism=2",
    "num_pipeline_microbatches=32",
    "num_layers_per_pipeline_stage=2",
    "num_pipeline_repeats=2",
    "compile_topology=v5p-16",
    "compile_topology_num_slices=1",
)
MAXPIPE_V5P = (
    "model.embed_dim=2048",
    "model.num_query_heads=16",
    "model.num_kv_heads=16",
    "model.head_dim=128",
    "model.mlp_dim=8192",
    "model.num_layers=16",
    "model.vocab_size=32768",
    "data.sequence_length=2048",
    "data.global_batch_size=64",
    "model.dtype=bfloat16",
    "mesh.ici.stage=4",
    "mesh.ici.fsdp=2",
    "pipeline.num_microbatches=32",
    "pipeline.num_repeats=2",
    "compile.topology=v5p:2x2x2",
)


class Failed(Exception):
    """Something stands in the way; the message tells the user what."""


@dataclass
class Run:
    """Measurements of one training command.

    Attributes:
      first_step: seconds from its start to the end of the first step.
      cpu: CPU seconds of each later step.
      wall: seconds of each later step.
      peak: bytes of resident memory.
    """

    first_step: float
    cpu: list[float]
    wall: list[float]
    peak: int


@dataclass(frozen=True)
class Peer:
    """A Python with MaxText: its path, MaxText's configuration file, versions by distribution."""

    python: str
    base_config: str
    versions: dict[str, str]


def find_peer(python: str) -> Peer:
    """Look for MaxText and for the packages that maxpipe needs.

    Raises:
      Failed: with what to install.
    """
    code = (
        "import importlib.metadata as m, importlib.util as u, json\n"
        "spec = u.find_spec('maxtext')\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return ''\n"
        "names = ('maxtext', 'jax', 'jaxlib', 'libtpu')\n"
        "needed = ('flax', 'optax', 'orbax', 'grain', 'prometheus_client', 'yaml',\n"
        "          'tensorboardX', 'tokenizers', 'tqdm')\n"
        "print(json.dumps([list(spec.submodule_search_locations) if spec else [],\n"
        "                  {n: version(n) for n in names},\n"
        "                  [n for n in needed if u.find_spec(n) is None]]))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except OSError as error:
        raise Failed(
            f"cannot run {python}: {error.strerror}; give the Python that has MaxText"
        ) from None
    except subprocess.CalledProcessError as error:
        raise Failed(f"{python} is not a usable Python:\n{error.stderr[-1000:]}") from None
    places, versions, missing = json.loads(done.stdout)
    if versions["maxtext"] != MAXTEXT or not places:
        installed = f"maxtext {versions['maxtext']}" if versions["maxtext"] else "no maxtext"
        remedy = f"uv pip install --python {python} 'maxtext[tpu]=={MAXTEXT}' --resolution=lowest"
        raise Failed(f"{python} has {installed}; install it with: {remedy}")
    if missing:
        raise Failed(f"{python} lacks what maxpipe needs: {', '.join(missing)}; install it there")
    return Peer(python, f"{places[0]}/configs/base.yml", versions)


def maxtext_command(peer: Peer, module: str, directory: str, words: Sequence[str]) -> list[str]:
    return [
        peer.python,
        "-m",
        f"maxtext.trainers.pre_train.{module}",
        peer.base_config,
        "run_name=compared",
        f"base_output_directory={directory}",
        "jax_cache_dir=",
        "dataset_type=synthetic",
        "packing=False",
        "enable_checkpointing=False",
        "enable_tensorboard=False",
        "remat_policy=full",
        "log_config=False",
        *words,
    ]


def maxpipe_command(python: str, module: str, directory: str, words: Sequence[str]) -> list[str]:
    """Return the command; a later word replaces an earlier one of its key."""
    values = [
        f"output_dir={directory}",
        "data.source=synthetic",
        "eval.every=0",
        "checkpoint.every=0",
        "telemetry.log_every=1",
        "pipeline.remat_policy=full",
        "compile.cache_dir=off",
        *words,
    ]
    by_key = {word.partition("=")[0]: word for word in values}
    config = str(ROOT / "configs" / "base.yml")
    return [python, "-m", f"maxpipe.{module}", config, *by_key.values()]


def jax_version(python: str) -> str:
    """Return the version of JAX that this Python has.

    Raises:
      Failed: it cannot run maxpipe.
    """
    code = "import importlib.metadata as m, prometheus_client; print(m.version('jax'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"--ours {python} cannot run maxpipe; install it there:\n{done.stderr[-300:]}")
    return done.stdout.strip()


def environment(trainer: str) -> dict[str, str]:
    """Return this process's variables without those that change how JAX runs."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "LIBTPU_"))}
    own |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    if trainer == "maxtext":
        return own | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "DECOUPLE_GCLOUD": "TRUE",
        }
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))}


def train(trainer: str, command: Sequence[str], steps: int) -> Run:
    """Run a training command to its end.

    Raises:
      Failed: it failed, or wrote other lines than expected.
    """
    started, ends, output = time.perf_counter(), [], []
    process = subprocess.Popen(
        command,
        env=environment(trainer),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if STEP_LINES[trainer].search(line):
            ends.append((time.perf_counter() - started, cpu_seconds(process.pid)))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or len(ends) != steps:
        raise Failed(
            f"{' '.join(command)}\nended with {process.returncode}:\n{''.join(output[-30:])}"
        )
    differences = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
    return Run(
        ends[0][0],
        [cpu for _, cpu in differences],
        [wall for wall, _ in differences],
        usage.ru_maxrss * 1024,
    )


def compare_training(
    peer: Peer,
    ours: dict[str, str],
    names: Sequence[str],
    rounds: int,
    steps: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[Run]]]:
    """Return case -> trainer -> runs; MaxText and maxpipe by each Python of `ours` take turns."""
    runs: dict[str, dict[str, list[Run]]] = {
        name: {trainer: [] for trainer in ("maxtext", *ours)} for name in names
    }
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds):
            for name in names:
                for trainer, group in runs[name].items():
                    label = f"{name}-{number}-{trainer.split()[-1]}"
                    command = _training(peer, ours.get(trainer), name, steps, directory, label)
                    group.append(train(trainer.partition(",")[0], command, steps))
                    say(f"{name}, {trainer}: {statistics.median(group[-1].cpu):.1f} CPU s a step")
    return runs


def _training(
    peer: Peer, python: str | None, name: str, steps: int, directory: str, label: str
) -> list[str]:
    theirs, ours = CASES[name]
    if python is None:
        fixed = (f"steps={steps}", "hardware=cpu", "skip_jax_distributed_system=True")
        return maxtext_command(peer, "train", directory, (*MAXTEXT_SMALL, *theirs, *fixed))
    fixed = (f"steps={steps}", f"mesh.simulated_devices={DEVICES}", f"run_name={label}")
    return maxpipe_command(python, "train", directory, (*MAXPIPE_SMALL, *ours, *fixed))


def compile_memory(peer: Peer, say: Callable[[str], None]) -> dict[str, dict[str, int]]:
    """Return trainer or schedule -> bytes of one v5p chip: arguments, temp.

    Raises:
      Failed: a command failed.
    """
    memory = {}
    with tempfile.TemporaryDirectory() as directory:
        text = _output("maxtext", maxtext_command(peer, "train_compile", directory, MAXTEXT_V5P))
        matches = {
            name: re.search(rf"{name}_size_in_bytes=(\d+)", text) for name in ("argument", "temp")
        }
        if not all(matches.values()):
            raise Failed(f"MaxText printed no CompiledMemoryStats:\n{text[-2000:]}")
        memory["maxtext circular"] = {
            name: int(match[1]) for name, match in matches.items() if match
        }
        say("v5p: MaxText compiled")
        for schedule in ("circular", "lockstep_1f1b"):
            file = Path(directory) / "report.json"
            words = (*MAXPIPE_V5P, f"pipeline.schedule={schedule}")
            _output(
                "maxpipe",
                [*maxpipe_command(peer.python, "compile", directory, words), "--json", str(file)],
            )
            sizes = json.loads(file.read_text())["memory"]
            memory[f"maxpipe {schedule}"] = {
                "argument": sizes["arguments_bytes"],
                "temp": sizes["temp_bytes"],
            }
            say(f"v5p: maxpipe {schedule} compiled")
    return memory


def _output(trainer: str, command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        env=environment(trainer),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def training_table(runs: dict[str, dict[str, list[Run]]]) -> str:
    """Return Markdown: medians over all rounds with the range of CPU seconds and of ratios."""
    lines = [
        "| case | trainer | CPU s a step (range) | MaxText / this (range) | first step s"
        " | wall s a step | peak MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case, groups in runs.items():
        theirs = [statistics.median(run.cpu) for run in groups["maxtext"]]
        for trainer, group in groups.items():
            cpu = [statistics.median(run.cpu) for run in group]
            ratios = [a / b for a, b in zip(theirs, cpu, strict=True)]
            cells = [
                f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{statistics.median(run.first_step for run in group):.1f}",
                f"{statistics.median(wall for run in group for wall in run.wall):.2f}",
                f"{statistics.median(run.peak / MIB for run in group):.0f}",
            ]
            lines.append(f"| {case} | {trainer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(memory: dict[str, dict[str, int]]) -> str:
    """Return Markdown: MiB of one v5p chip, and MaxText's temp over each."""
    reference = memory["maxtext circular"]["temp"]
    lines = [
        "| v5p, 32 microbatches | arguments MiB | temp MiB | MaxText / this |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, sizes in memory.items():
        argument, temp = sizes["argument"] / MIB, sizes["temp"] / MIB
        cells = f"{argument:.0f} | {temp:.0f} | {reference / sizes['temp']:.2f}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", metavar="PYTHON", help="a Python with maxtext")
    parser.add_argument(
        "--case", nargs="*", default=list(CASES), choices=CASES, help="none: skip training"
    )
    parser.add_argument(
        "--ours", nargs="*", default=[], metavar="PYTHON", help="further Pythons for maxpipe"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each trainer and case")
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of a run; the first is not counted"
    )
    parser.add_argument("--no-topology", action="store_true", help="leave out compiling for v5p")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.steps < 2:
        parser.error("--rounds must be at least 1 and --steps at least 2")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    measured: dict[str, Any] = {}
    try:
        peer = find_peer(options.python)
        measured["versions"] = peer.versions
        print(
            "on both sides: "
            + ", ".join(f"{name} {version}" for name, version in peer.versions.items() if version)
        )
        if options.case:
            ours = {f"maxpipe, jax {jax_version(python)}": python for python in options.ours}
            ours = {f"maxpipe, jax {peer.versions['jax']}": peer.python} | ours
            runs = compare_training(peer, ours, options.case, options.rounds, options.steps, say)
            measured["training"] = {
                c: {t: [asdict(r) for r in rs] for t, rs in g.items()} for c, g in runs.items()
            }
            print(training_table(runs), flush=True)
        if not options.no_topology:
            measured["v5p"] = compile_memory(peer, say)
            print(memory_table(measured["v5p"]))
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if options.json:
            options.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
