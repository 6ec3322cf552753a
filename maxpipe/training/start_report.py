"""Report at the start of a run what runs, what was decided automatically, and why."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxpipe.config.catalog import ENGINES
from maxpipe.config.sections import Config
from maxpipe.data.documents import describe_sources
from maxpipe.devices.chips import short_name
from maxpipe.pipeline.layout import build_layout
from maxpipe.plan.auto_stages import bubble_fraction, slowest_stage
from maxpipe.plan.flops import (
    active_parameter_count,
    parameter_count,
    trained_parameter_count,
)

MAX_LINES = 25
MAX_STAGES = 8
MAX_NOTES = 6
CHOICE = re.compile(r"[\w.]+=\S+: ")  # a decision that is a value with its reason


class Decisions:
    """Automatic decisions with their reasons: collected for the report, and logged after it.

    Args:
      log: function that prints a line.
    """

    def __init__(self, log: Callable[[str], None]):
        self._log = log
        self._pending: list[str] | None = []

    def add(self, decision: str) -> None:
        """Note `key=value: reason`, for the report or, after it, as a line of its own."""
        if self._pending is None:
            self._log(decision)
        else:
            self._pending.append(decision)

    def take(self, first: Sequence[str]) -> list[str]:
        """Return `first` and what was noted so far, for the report."""
        assert self._pending is not None, "the report was shown already"
        decisions = [*first, *self._pending]
        self._pending = None
        return decisions


@dataclass(frozen=True)
class RunSummary:
    """The facts that the report shows.

    Attributes:
      run_dir: the run's directory.
      device_kind: usual name of the devices' chip.
      num_devices, num_processes: devices and processes of the whole run.
      is_simulated: whether the devices are simulated on a CPU.
      mesh: size of each axis, in the order of the mesh.
      num_parameters, parameter_bytes: size of the whole model, without optimizer state.
      num_active: parameters that a token uses, fewer with experts.
      num_trained: parameters that are not frozen, fewer with adapters.
      stage_layers: for each pipeline stage the indices of its layers, ascending; empty without a
        pipeline.
      schedule: engine and schedule in words.
      num_microbatches: microbatches per step.
      bubble: idle share of the stages' time in a step, from 0 to 1.
      data: source, tokenizer and tokens per step in words.
      steps: steps of the whole run.
      resumed_step: step of the restored checkpoint, or None for a fresh run.
      held_out: what evaluations read, in words; empty without them.
      slowest: the stage that takes much longer than the mean, and what helps; empty if none does.
      decisions: every automatic choice with its reason, a line each.
    """

    run_dir: str
    device_kind: str
    num_devices: int
    num_processes: int
    is_simulated: bool
    mesh: Mapping[str, int]
    num_parameters: int
    num_active: int
    num_trained: int
    parameter_bytes: int
    stage_layers: Sequence[Sequence[int]]
    schedule: str
    num_microbatches: int
    bubble: float
    data: str
    steps: int
    resumed_step: int | None = None
    held_out: str = ""
    slowest: str = ""
    decisions: Sequence[str] = ()


def start_summary(run: RunSummary) -> list[str]:
    """Return the report, one string per line, at most `MAX_LINES` of them.

    Notes for the user come right after the run; values that follow from others come last.
    """
    simulated = " simulated on one machine" if run.is_simulated else ""
    processes = _count(run.num_processes, "process")
    start = "fresh" if run.resumed_step is None else f"resumed after step {run.resumed_step}"
    axes = " x ".join(f"{axis}={size}" for axis, size in run.mesh.items() if size > 1)
    chosen = [decision for decision in run.decisions if CHOICE.match(decision)]
    notes = [decision for decision in run.decisions if not CHOICE.match(decision)]
    lines = [
        _line("run", f"{run.run_dir}, {run.steps} steps, {start}"),
        *(_line("note", note) for note in notes[:MAX_NOTES]),
        _line("devices", f"{run.num_devices} x {run.device_kind}{simulated}, {processes}"),
        _line("mesh", axes or "one device"),
        _line("parameters", _parameters(run)),
        _line("pipeline", _pipeline(run)),
        *_stages(run.stage_layers),
        *([_line("  slowest", run.slowest)] if run.slowest else []),
        _line("data", run.data),
        *([_line("held out", run.held_out)] if run.held_out else []),
    ]
    room = MAX_LINES - len(lines)
    hidden = max(len(notes) - MAX_NOTES, 0)
    shown = chosen if len(chosen) <= room and not hidden else chosen[: room - 1]
    lines += [_line("chosen", decision) for decision in shown]
    if hidden := hidden + len(chosen) - len(shown):
        lines.append(_line("chosen", f"{hidden} more values; --print-config shows them all"))
    return lines


def compress(indices: Sequence[int]) -> str:
    """Write ascending whole numbers as ranges: [0, 1, 2, 8, 9, 12] becomes "0-2, 8-9, 12"."""
    ranges = []
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(ranges)


def _parameters(run: RunSummary) -> str:
    total = f"{run.num_parameters:,} ({_bytes(run.parameter_bytes)})"
    if run.num_active < run.num_parameters:
        total += f", {run.num_active:,} of them active"
    if run.num_trained < run.num_parameters:
        total += f", {run.num_trained:,} of them trained"
    return total


def _pipeline(run: RunSummary) -> str:
    microbatches = _count(run.num_microbatches, "microbatch")
    if not run.stage_layers:
        summed = ", whose gradients add up" if run.num_microbatches > 1 else ""
        return f"none ({run.schedule}), {microbatches}{summed}"
    return f"{run.schedule}, {microbatches}, bubble {100 * run.bubble:.1f} %"


def _stages(stage_layers: Sequence[Sequence[int]]) -> list[str]:
    """Return a line per stage; with many stages the first ones and the last."""
    lines = [
        _line(f"  stage {s}", f"layers {compress(layers)}") for s, layers in enumerate(stage_layers)
    ]
    if len(lines) <= MAX_STAGES:
        return lines
    return [*lines[: MAX_STAGES - 2], _line("  ...", ""), lines[-1]]


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else noun + "es" if noun.endswith(("s", "ch")) else noun + "s"
    return f"{number} {plural}"


def _bytes(count: int) -> str:
    """Format bytes with three significant digits in MiB, GiB or TiB."""
    mebibytes = count / 2**20
    if mebibytes < 1000:
        return f"{mebibytes:.3g} MiB"
    return (
        f"{mebibytes / 2**10:.3g} GiB"
        if mebibytes < 1000 * 2**10
        else f"{mebibytes / 2**20:.3g} TiB"
    )


def _line(label: str, text: str) -> str:
    return f"{label:<12}{text}".rstrip()


def report(
    config: Config, mesh: Mesh, root: str, step: int, held_out: str, decisions: Sequence[str]
) -> list[str]:
    """Return lines about devices, model, stages, data and every automatic decision; at most 25.

    Args:
      config: the resolved configuration.
      mesh: the device mesh.
      root: the run's directory.
      step: finished steps.
      held_out: what evaluations read, in words; empty without them.
      decisions: `key=value: reason`, one line each.
    """
    device = mesh.devices.flat[0]
    parameters = parameter_count(config.model)
    data = config.data
    tokens = data.global_batch_size * data.sequence_length
    pipelined = ENGINES[config.pipeline.engine].has_stages
    layout = build_layout(config)
    stages = range(layout.num_stages) if pipelined else ()
    summary = RunSummary(
        run_dir=root,
        device_kind=short_name(device.device_kind),
        num_devices=mesh.size,
        num_processes=jax.process_count(),
        is_simulated=device.platform == "cpu" and mesh.size > jax.process_count(),
        mesh=dict(mesh.shape),
        num_parameters=parameters,
        num_active=active_parameter_count(config.model),
        num_trained=trained_parameter_count(config.model),
        parameter_bytes=parameters * jnp.dtype(config.model.param_dtype).itemsize,
        stage_layers=[
            [i + config.model.first_dense_layers for chunk in layout.stage_layers(s) for i in chunk]
            for s in stages
        ],
        schedule=f"{config.pipeline.schedule} on the {config.pipeline.engine} engine"
        if pipelined
        else "sequential",
        num_microbatches=config.pipeline.num_microbatches,
        bubble=bubble_fraction(config) if pipelined else 0.0,
        slowest=slowest_stage(config) if pipelined else "",
        data=f"{describe_sources(data)}, {data.tokenizer} tokens, "
        f"{data.global_batch_size} x {data.sequence_length} = {tokens} a step",
        held_out=f"{held_out} every {config.eval.every} steps" if held_out else "",
        steps=config.steps,
        resumed_step=step or None,
        decisions=decisions,
    )
    return start_summary(summary)
