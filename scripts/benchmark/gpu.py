"""Train a Llama-like model of 1.1 billion parameters on one GPU, in maxpipe and in PyTorch.

    python scripts/benchmark/run.py --gpu

Every turn is a process of its own. Both train float32 parameters with bfloat16 matrix products,
AdamW and clipped gradients, on the same shapes and the same number of tokens per step. MFU counts
the FLOPs of the mathematics only, so recomputation lowers it.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
SHAPE = {
    "num_layers": 16,
    "embed_dim": 2048,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "mlp_dim": 8192,
    "vocab_size": 32768,
}
CASES: dict[str, Row] = {
    "1b_2k": SHAPE | {"sequence_length": 2048, "batch_size": 16, "num_microbatches": 4},
    "1b_8k": SHAPE | {"sequence_length": 8192, "batch_size": 4, "num_microbatches": 4},
}
TINY: Row = {
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_dim": 32,
    "vocab_size": 64,
    "sequence_length": 8,
    "batch_size": 4,
    "num_microbatches": 2,
}
POLICIES = ("none", "minimal", "full")
ATTENTION = ("cudnn", "dot_product")  # every kernel that runs on GPUs
STEPS = 8


def run(
    rounds: int, say: Callable[[str], None], cases: dict[str, Row] = CASES, *, need_gpu: bool = True
) -> list[Row]:
    """Measure every case with every implementation that is installed, in turns.

    Args:
      rounds: processes per case and implementation.
      say: told of each result.
      cases: shapes by name.
      need_gpu: refuse to run on anything else.

    Returns:
      Rows with "case", "implementation", "tokens_per_second" and "mfu" (None where the chip's peak
      is unknown), medians over rounds, and "peak_bytes"; or with "error" where it did not run, as
      when memory is short.

    Raises:
      ValueError: there is no GPU.
    """
    workers = {
        f"maxpipe, remat {policy}, {attention}": [str(HERE / "gpu.py"), policy, attention]
        for attention in ATTENTION
        for policy in POLICIES
    }
    if importlib.util.find_spec("torch"):
        workers["PyTorch"] = [str(HERE / "torch_llama.py")]
    else:
        say("torch is not installed; maxpipe alone")
    runs: dict[tuple[str, str], list[Row]] = {(c, w): [] for c in cases for w in workers}
    for _ in range(rounds):
        for (case, worker), results in runs.items():
            shape = cases[case] | {"steps": STEPS, "need_gpu": need_gpu}
            results.append(_start(workers[worker], shape))
            say(f"{case}, {worker}: {results[-1].get('error') or results[-1]['step_seconds']}")
    return [
        _summary(case, worker, cases[case], results) for (case, worker), results in runs.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| case | implementation | tokens/s | MFU % | peak GiB |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | {row['implementation']} | {row['error']} | | |")
            continue
        mfu = f"{100 * row['mfu']:.1f}" if row["mfu"] else "?"
        peak = f"{row['peak_bytes'] / 2**30:.1f}" if row["peak_bytes"] else "?"
        lines.append(
            f"| {row['case']} | {row['implementation']} | {row['tokens_per_second']:.0f} "
            f"| {mfu} | {peak} |"
        )
    return "\n".join(lines)


def _start(words: Sequence[str], shape: Row) -> Row:
    command = [sys.executable, *words, json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    if done.returncode == 2:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        short = any(word in done.stderr for word in ("RESOURCE_EXHAUSTED", "OutOfMemoryError"))
        return {"error": "out of memory" if short else lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def _summary(case: str, worker: str, shape: Row, results: Sequence[Row]) -> Row:
    from maxpipe.config.sections import ModelConfig
    from maxpipe.devices.chips import chip_for
    from maxpipe.plan.flops import model_flops_per_token

    row = {"case": case, "implementation": worker, "results": list(results)}
    if any("error" in result for result in results):
        return row | {"error": next(r["error"] for r in results if "error" in r)}
    model = ModelConfig(**model_values(shape))
    rate = (
        shape["batch_size"]
        * shape["sequence_length"]
        / statistics.median(r["step_seconds"] for r in results)
    )
    chip = chip_for(results[0]["device_kind"])
    flops = model_flops_per_token(model, shape["sequence_length"])
    mfu = rate * flops / chip.peak_flops["bfloat16"] if chip else None
    peaks = [r["peak_bytes"] for r in results if r["peak_bytes"]]
    return row | {"tokens_per_second": rate, "mfu": mfu, "peak_bytes": max(peaks, default=None)}


def model_values(shape: Row) -> Row:
    """Return `model.*` of a shape."""
    names = ("num_layers", "embed_dim", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size")
    return {name: shape[name] for name in names} | {
        "num_query_heads": shape["num_heads"],
        "dtype": "bfloat16",
    }


def measure(policy: str, attention: str, shape: Row) -> Row:
    """Train in this process; return the median step, its device and its peak memory."""
    import jax
    import numpy as np

    from maxpipe.builder import build_trainer
    from maxpipe.config import Config, replace, resolve
    from maxpipe.devices.mesh import build_mesh
    from maxpipe.training.batches import BatchPlacer

    device = jax.devices()[0]
    if shape["need_gpu"] and device.platform != "gpu":
        raise ValueError(
            f"--gpu: JAX has no GPU that it can use, only {device.platform}; install maxpipe[cuda]"
        )
    rows, length = shape["batch_size"], shape["sequence_length"]
    values = {f"model.{name}": value for name, value in model_values(shape).items()} | {
        "data.global_batch_size": rows,
        "data.sequence_length": length,
        "eval.every": 0,
        "model.attention": attention,
        "pipeline.engine": "sequential",
        "pipeline.num_microbatches": shape["num_microbatches"],
        "pipeline.remat_policy": policy,
    }
    config = resolve(replace(Config(), **values), 1)
    mesh = build_mesh(config, [device])
    engine = build_trainer(config, mesh)
    tokens = (
        np.random.default_rng(0)
        .integers(0, shape["vocab_size"], (rows, length + 1))
        .astype(np.int32)
    )
    batch = BatchPlacer(mesh, engine.batch_spec, rows)(
        {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
            "segment_ids": np.ones((rows, length), np.int32),
            "weights": np.ones((rows, length), np.float32),
        }
    )
    state, seconds = engine.init(jax.random.key(0)), []
    for _ in range(shape["steps"]):
        started = time.perf_counter()
        state, metrics = engine.step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - started)
    statistic = device.memory_stats() or {}
    # The first step compiles, the second may still allocate.
    return {
        "step_seconds": statistics.median(seconds[2:]),
        "loss": float(metrics["loss"]),
        "device_kind": device.device_kind,
        "peak_bytes": statistic.get("peak_bytes_in_use"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="One turn of maxpipe; scripts/benchmark/run.py --gpu starts it."
    )
    parser.add_argument("policy", choices=POLICIES)
    parser.add_argument("attention", choices=ATTENTION)
    parser.add_argument("shape", type=json.loads)
    options = parser.parse_args(argv)
    try:
        print(json.dumps(measure(options.policy, options.attention, options.shape)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
