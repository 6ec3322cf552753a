"""Report at the start of a run what runs, what was decided automatically, and why."""

import re
from collections.abc import Sequence
from itertools import groupby

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.config.sections.model import ModelConfig
from maxpipe.data.documents import describe_sources
from maxpipe.devices.chips import short_name
from maxpipe.pipeline.layout import build_layout
from maxpipe.plan.auto_stages import bubble_fraction, slowest_stage
from maxpipe.plan.flops import active_parameter_count, parameter_count, trained_parameter_count

MAX_LINES = 25
MAX_STAGES = 8
CHOICE = re.compile(r"[\w.]+=\S+: ")  # a decision that is a value with its reason


def report(
    config: Config, mesh: Mesh, root: str, step: int, held_out: str, decisions: Sequence[str]
) -> list[str]:
    """Return lines about devices, model, stages, data and every automatic decision; about 25.

    Notes for the user come right after the run; values that follow from others come last.

    Args:
      held_out: what evaluations read, in words; empty without them.
      decisions: `key=value: reason`, one line each.
    """
    start = f"resumed after step {step}" if step else "fresh"
    chosen = [decision for decision in decisions if CHOICE.match(decision)]
    notes = [decision for decision in decisions if not CHOICE.match(decision)]
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    data = config.data
    batch = f"{data.global_batch_size} x {data.sequence_length}"
    tokens = data.global_batch_size * data.sequence_length
    sources = f"{describe_sources(data)}, {data.tokenizer} tokens, {batch} = {tokens} a step"
    lines = [
        _line("run", f"{root}, {config.steps} steps, {start}"),
        *(_line("note", note) for note in notes),
        _line("devices", _devices(mesh)),
        _line("mesh", axes or "one device"),
        _line("parameters", _parameters(config.model)),
        *_pipeline(config),
        _line("data", sources),
        *([_line("held out", f"{held_out} every {config.eval.every} steps")] if held_out else []),
    ]
    room = max(MAX_LINES - len(lines), 1)
    shown = chosen if len(chosen) <= room else chosen[: room - 1]
    lines += [_line("chosen", decision) for decision in shown]
    if hidden := len(chosen) - len(shown):
        lines.append(_line("chosen", f"{hidden} more values; --print-config shows them all"))
    return lines


def compress(indices: Sequence[int]) -> str:
    """Write ascending whole numbers as ranges: [0, 1, 2, 8, 9, 12] becomes "0-2, 8-9, 12"."""
    ranges = []
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(ranges)


def format_memory(count: int) -> str:
    for unit, size in (("MiB", 2**20), ("GiB", 2**30)):
        if count < 1000 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 2**40:.3g} TiB"


def _devices(mesh: Mesh) -> str:
    device, num_processes = mesh.devices.flat[0], jax.process_count()
    is_simulated = device.platform == "cpu" and mesh.size > num_processes
    simulated = " simulated on one machine" if is_simulated else ""
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return f"{mesh.size} x {short_name(device.device_kind)}{simulated}, {processes}"


def _parameters(model: ModelConfig) -> str:
    count = parameter_count(model)
    total = f"{count:,} ({format_memory(count * jnp.dtype(model.param_dtype).itemsize)})"
    if (active := active_parameter_count(model)) < count:  # experts
        total += f", {active:,} of them active"
    if (trained := trained_parameter_count(model)) < count:  # adapters
        total += f", {trained:,} of them trained"
    return total


def _pipeline(config: Config) -> list[str]:
    number = config.pipeline.num_microbatches
    microbatches = "1 microbatch" if number == 1 else f"{number} microbatches"
    if not ENGINES[config.pipeline.engine].has_stages:
        summed = ", whose gradients add up" if number > 1 else ""
        return [_line("pipeline", f"none (sequential), {microbatches}{summed}")]
    schedule = f"{config.pipeline.schedule} on the {config.pipeline.engine} engine"
    bubble = f"bubble {100 * bubble_fraction(config):.1f} %"
    layout = build_layout(config)
    first = config.model.first_dense_layers
    stages = []
    for stage in range(layout.num_stages):
        layers = [i + first for chunk in layout.stage_layers(stage) for i in chunk]
        stages.append(_line(f"  stage {stage}", f"layers {compress(layers)}"))
    if len(stages) > MAX_STAGES:
        stages[MAX_STAGES - 2 : -1] = [_line("  ...", "")]
    slowest = slowest_stage(config)
    return [
        _line("pipeline", f"{schedule}, {microbatches}, {bubble}"),
        *stages,
        *([_line("  slowest", slowest)] if slowest else []),
    ]


def _line(label: str, text: str) -> str:
    return f"{label:<12}{text}".rstrip()
