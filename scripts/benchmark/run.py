"""Measure engines, schedules and options side by side, in turns on one machine.

    python scripts/benchmark/run.py                   the three engines, 8 simulated CPU devices
    python scripts/benchmark/run.py --case engines variants --rounds 7 --json out.json
    python scripts/benchmark/run.py --case lockstep_1f1b circular/none
    python scripts/benchmark/run.py --case startup    from the command to the first finished step
    python scripts/benchmark/run.py --case overhead   what guard, watchdog and digests cost
    python scripts/benchmark/run.py --gpu             one GPU, next to PyTorch if it is installed
    python scripts/benchmark/run.py --list

Every case is compiled first, without a compilation cache. Then each round runs one step of every
case, so that a change in the machine's speed hits all of them. Reported are medians over rounds,
and medians of the ratios within a round. CPU seconds are user and system time of the process: on
simulated devices, which share the cores, they say what wall time cannot. Temp memory is the
compiler's figure for one device.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu
import overhead
import startup

MIB = 2**20
NUM_DEVICES = 8
Values = dict[str, Any]

# 8 layers, 4 heads of 64, 32 x 256 tokens: large enough that matrix products count, small enough
# for a laptop.
SMALL: Values = {
    "model.num_layers": 8,
    "model.embed_dim": 256,
    "model.num_query_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 64,
    "model.mlp_dim": 1024,
    "model.vocab_size": 1024,
    "data.sequence_length": 256,
    "data.global_batch_size": 32,
    "eval.every": 0,
}
TINY: Values = SMALL | {
    "model.embed_dim": 32,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.vocab_size": 64,
    "data.sequence_length": 16,
}

SEQUENTIAL: Values = {"pipeline.engine": "sequential", "mesh.ici.fsdp": 8}
STAGES: Values = {
    "mesh.ici.stage": 4,
    "mesh.ici.fsdp": 2,
    "pipeline.num_microbatches": 8,
    "pipeline.num_repeats": 2,
}
CIRCULAR: Values = STAGES | {"pipeline.schedule": "circular"}
LOCKSTEP: Values = STAGES | {"pipeline.schedule": "lockstep_1f1b"}
ONE_REPEAT: Values = {"pipeline.num_repeats": 1}
ENGINES = {"sequential": SEQUENTIAL, "circular": CIRCULAR, "lockstep_1f1b": LOCKSTEP}


def variants() -> dict[str, Values]:
    """Return the engines with one option changed each."""
    cases = {
        "gpipe": CIRCULAR | ONE_REPEAT | {"pipeline.schedule": "gpipe"},
        "circular/once": CIRCULAR | {"pipeline.fsdp_gather": "once"},
        "circular/delayed": CIRCULAR | {"pipeline.delay_activation_forwarding": True},
        "lockstep_1f1b/V1": LOCKSTEP | ONE_REPEAT,
        "lockstep_1f1b/once": LOCKSTEP | {"pipeline.fsdp_gather": "once"},
        "lockstep_1f1b/masked": LOCKSTEP | {"pipeline.skip_idle": "false"},
        "lockstep_1f1b/overlap": LOCKSTEP | {"pipeline.overlap_slots": True},
        "lockstep_1f1b/delayed": LOCKSTEP | {"pipeline.delay_activation_forwarding": True},
    }
    for policy in ("minimal", "none"):
        for name, values in ENGINES.items():
            cases[f"{name}/{policy}"] = values | {"pipeline.remat_policy": policy}
    # A split backward needs stored residuals, so its peer is lockstep_1f1b/minimal.
    cases["lockstep_zb/minimal"] = cases["lockstep_1f1b/minimal"] | {
        "pipeline.schedule": "lockstep_zb"
    }
    return cases


def more_microbatches() -> dict[str, Values]:
    """Return cases with four times the microbatches of the same size: whose memory grows?"""
    more = {"pipeline.num_microbatches": 32, "data.global_batch_size": 128}
    return {
        f"{name}/M32": values | more for name, values in ENGINES.items() if name != "sequential"
    }


def prefixed(prefix: str, size: Values) -> dict[str, Values]:
    return {f"{prefix}/{name}": values | size for name, values in ENGINES.items()}


def tiled() -> dict[str, Values]:
    """Return cases whose logits are most of the memory: all at once, and in 16 tiles."""
    size = SMALL | {
        "model.vocab_size": 128256,
        "model.embed_dim": 64,
        "model.head_dim": 16,
        "model.mlp_dim": 256,
    }
    size |= {"data.global_batch_size": 16, "model.num_layers": 8}
    cases = prefixed("V128k", size)
    return cases | {
        f"{name}/tiled": values | {"model.logit_tiles": 16} for name, values in cases.items()
    }


GROUPS: dict[str, dict[str, Values]] = {
    "engines": {name: SMALL | values for name, values in ENGINES.items()},
    "variants": {name: SMALL | values for name, values in variants().items()},
    "microbatches": {name: SMALL | values for name, values in more_microbatches().items()},
    "vocabulary": prefixed("V32k", SMALL | {"model.vocab_size": 32768}),
    "tiles": tiled(),
    "bfloat16": prefixed("bf16", SMALL | {"model.dtype": "bfloat16"}),
    "tiny": prefixed("tiny", TINY),
}
CASES = {name: values for group in GROUPS.values() for name, values in group.items()}
STARTUP, OVERHEAD = "startup", "overhead"


@dataclass
class Result:
    """Measurements of one case.

    Attributes:
      name, values: the case.
      trace_seconds, compile_seconds: Python to StableHLO, StableHLO to an executable.
      temp_bytes, argument_bytes: of one device, from the compiler.
      wall, cpu: seconds of each counted step.
      loss: of the last step, a sign of life.
    """

    name: str
    values: Values
    trace_seconds: float
    compile_seconds: float
    temp_bytes: int
    argument_bytes: int
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: float = float("nan")


class Case:
    """One compiled train step with its own state and batch, run a step at a time."""

    def __init__(self, name: str, values: Values, num_devices: int = NUM_DEVICES):
        import jax
        import numpy as np

        from maxpipe.builder import build_trainer
        from maxpipe.config import Config, replace, resolve
        from maxpipe.devices.mesh import build_mesh
        from maxpipe.training.batches import BatchPlacer

        config = resolve(replace(Config(), **values), num_devices)
        mesh = build_mesh(config, jax.devices()[:num_devices])
        engine = build_trainer(config, mesh)
        rows, length, vocab = (
            config.data.global_batch_size,
            config.data.sequence_length,
            config.model.vocab_size,
        )
        tokens = np.random.default_rng(0).integers(0, vocab, (rows, length + 1)).astype(np.int32)
        host = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
            "segment_ids": np.ones((rows, length), np.int32),
            "weights": np.ones((rows, length), np.float32),
        }
        self.batch = BatchPlacer(mesh, engine.batch_spec, rows)(host)
        self.state = engine.init(jax.random.key(0))
        started = time.perf_counter()
        lowered = engine.jitted_step.lower(self.state, self.batch)
        traced = time.perf_counter()
        self._step = lowered.compile()
        compiled = time.perf_counter()
        memory = self._step.memory_analysis()
        self.result = Result(
            name,
            values,
            traced - started,
            compiled - traced,
            memory.temp_size_in_bytes,
            memory.argument_size_in_bytes,
        )
        self.step()

    def step(self) -> tuple[float, float]:
        """Run one step: (wall seconds, CPU seconds)."""
        import jax

        before, started = os.times(), time.perf_counter()
        self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        wall, after = time.perf_counter() - started, os.times()
        self.result.loss = float(metrics["loss"])
        return wall, after.user - before.user + after.system - before.system


def start() -> None:
    """Start JAX on simulated devices, or on what the machine has, without a compilation cache."""
    import jax

    from maxpipe.config import Config, replace
    from maxpipe.devices.start import start_jax

    start_jax(
        replace(Config(), **{"mesh.simulated_devices": NUM_DEVICES, "compile.cache_dir": "off"})
    )
    jax.config.update("jax_enable_compilation_cache", False)


def run_cases(names: Sequence[str], rounds: int) -> list[Result]:
    """Compile the cases one after the other, then run them in turns."""
    cases = []
    for name in names:
        cases.append(Case(name, CASES[name]))
        say(f"{name}: compiled in {cases[-1].result.compile_seconds:.1f} s")
    for number in range(rounds):
        # The first case changes from round to round, so that none always follows the same one.
        for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
            wall, cpu = case.step()
            case.result.wall.append(wall)
            case.result.cpu.append(cpu)
    return [case.result for case in cases]


def ratio(result: Result, other: Result) -> float:
    """Return the median over rounds of CPU seconds of one case over another's."""
    return statistics.median(a / b for a, b in zip(result.cpu, other.cpu, strict=True))


def references(results: Sequence[Result]) -> list[Result]:
    """Return the cases to compare with: sequential, and circular without options."""
    plain = {
        f"{prefix}{name}"
        for prefix in ("", "V32k/", "bf16/", "tiny/")
        for name in ("sequential", "circular")
    }
    return [result for result in results if result.name in plain]


def table(results: Sequence[Result]) -> str:
    """Return the results as Markdown."""
    compared = references(results)
    head = ["case", "step s", "CPU s", *(f"CPU / {other.name}" for other in compared)]
    head += ["trace s", "compile s", "temp MiB"]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for result in results:
        row = [
            result.name,
            f"{statistics.median(result.wall):.2f}",
            f"{statistics.median(result.cpu):.2f}",
        ]
        row += [f"{ratio(result, other):.2f}" for other in compared]
        row += [
            f"{result.trace_seconds:.1f}",
            f"{result.compile_seconds:.1f}",
            f"{result.temp_bytes / MIB:.1f}",
        ]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_json(results: Sequence[Result]) -> list[Values]:
    """Return one dictionary per case, with every round and the ratios."""
    compared = references(results)
    return [
        vars(result)
        | {
            "wall_median": statistics.median(result.wall),
            "cpu_median": statistics.median(result.cpu),
        }
        | {"cpu_ratio": {other.name: ratio(result, other) for other in compared}}
        for result in results
    ]


def surroundings() -> Values:
    """Return machine and versions."""
    versions = {
        name: metadata.version(name) for name in ("maxpipe", "jax", "jaxlib", "flax", "numpy")
    }
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **versions,
    }


def chosen(words: Sequence[str]) -> list[str]:
    """Return names of cases from names of cases and groups, each once.

    Raises:
      ValueError: a word is neither.
    """
    names: dict[str, None] = {}
    for word in words:
        if word in GROUPS:
            names |= dict.fromkeys(GROUPS[word])
        elif word in CASES or word in (STARTUP, OVERHEAD):
            names[word] = None
        else:
            raise ValueError(f"--case {word}: no such case or group; --list shows them")
    return list(names)


def listing() -> str:
    lines = []
    for group, cases in GROUPS.items():
        lines.append(f"{group}: {', '.join(cases)}")
    gpu_cases = ", ".join(gpu.CASES)
    lines.append(f"{STARTUP}: time from the command to the first finished step")
    lines.append(f"{OVERHEAD}: what guard, watchdog and digests cost")
    return "\n".join([*lines, f"--gpu: {gpu_cases}"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", nargs="+", default=["engines"], metavar="NAME", help="cases or groups of cases"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of every case")
    parser.add_argument("--gpu", action="store_true", help="the cases for one GPU instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--list", action="store_true", help="print the names of cases and groups")
    options = parser.parse_args(argv)
    if options.list:
        print(listing())
        return 0
    try:
        if options.rounds < 1:
            raise ValueError("--rounds: at least 1")
        measured, text = measure(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    if options.json:
        options.json.write_text(
            json.dumps(surroundings() | measured, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def measure(options: argparse.Namespace) -> tuple[Mapping[str, Any], str]:
    """Return (what goes into the JSON file, what is printed)."""
    if options.gpu:
        rows = gpu.run(options.rounds, say)
        return {"gpu": rows}, gpu.table(rows)
    names, measured, texts = chosen(options.case), {}, []
    if STARTUP in names:
        names.remove(STARTUP)
        with tempfile.TemporaryDirectory() as directory:
            rows = startup.run(Path(directory), options.rounds, say)
        measured[STARTUP] = rows
        texts.append(startup.table(rows))
    if names:
        start()
    if OVERHEAD in names:
        names.remove(OVERHEAD)
        rows = overhead.run(Case, options.rounds, say)
        measured[OVERHEAD] = rows
        texts.append(overhead.table(rows))
    if names:
        results = run_cases(names, options.rounds)
        measured["cases"] = as_json(results)
        texts.append(table(results))
    return {"rounds": options.rounds, **measured}, "\n\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
