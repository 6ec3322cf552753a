"""Draw the schedule of a configuration as it would run, with what its stages hold and take."""

import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from math import inf

from maxpipe.config import Config, ConfigError, Problem, load, resolve
from maxpipe.config.catalog import ENGINES
from maxpipe.config.slices import canonical_topology, num_devices
from maxpipe.config.values import AUTO
from maxpipe.devices.chips import GIB, topology_memory
from maxpipe.pipeline.engines.scheduled.tick_plan import lockstep_plan, plan_text
from maxpipe.plan.auto_stages import (
    PredictedStages,
    memory_limit,
    of_stage,
    plan_stages,
    predict,
    uniform_sizes,
    with_unit_times,
)
from maxpipe.plan.simulate import Simulation


def draw_configuration(path: str, overrides: Sequence[str]) -> tuple[list[Simulation], str, str]:
    """Simulate the schedule of a YAML file with `key=value` words.

    Devices are those of `compile.topology`, whose chips limit memory, else as many as the mesh
    names, where -1 counts as 1. Return the simulations of the configured stages, and of uniform
    ones if they differ, with tables named after their chunks; stages and figures, in lines; the
    model and the unit of time.

    Raises:
      ConfigError: the configuration is wrong, has one stage, or no stages that fit.
      ScheduleError: its schedule cannot be built.
    """
    loaded = load(path, overrides)
    config = with_unit_times(resolve(loaded, *_devices(loaded.config)))
    engine = ENGINES[config.pipeline.engine]
    if not engine.has_stages:
        message = "one stage has no schedule to draw; 2 or more make a pipeline"
        raise ConfigError(Problem("mesh.ici.stage", message))
    even = uniform_sizes(config)
    limit = memory_limit(config, topology_memory(config.compile.topology))
    uniform = predict(config, even) if even else None
    is_auto = config.pipeline.layers_per_stage == AUTO
    chosen = plan_stages(config, limit) if is_auto else predict(config)
    runs = []
    for prediction in (chosen, uniform):
        if prediction and (prediction is chosen or prediction.sizes != chosen.sizes):
            table = prediction.run.table
            name = f"{table.name} {str(prediction.sizes).replace(' ', '')}"
            runs.append(replace(prediction.run, table=replace(table, name=name)))
    text = _stages_text(chosen, uniform, None if engine.one_program else limit)
    return runs, text, f"{path}, {sum(chosen.sizes)} layers; the forward of a layer takes 1"


def plans_text(runs: Sequence[Simulation]) -> str:
    """Return what the scheduled engine does in each tick; ScheduleError if it cannot run one."""
    return "\n".join(f"{plan_text(lockstep_plan(run.table))}\n" for run in runs)


def _stages_text(
    chosen: PredictedStages, uniform: PredictedStages | None, limit: float | None
) -> str:
    """Return a line for each stage, then the slowest one, and uniform stages if they differ.

    The limit in bytes is infinite if unknown, and None where memory is another engine's.
    """
    lines = ["stages          times of one microbatch; the forward of a layer is 1"]
    for stage in range(chosen.run.table.num_stages):
        memory = "" if limit is None else f", {chosen.memory[stage] / GIB:.3g} GiB"
        lines.append(f"  {f'stage {stage}':<14}{_stage(chosen, stage)}{memory}")
    lines.append(f"slowest stage   {chosen.slowest:.4g}")
    if limit is not None and limit != inf:
        lines.append(f"limit           {limit / GIB:.3g} GiB a device")
    if uniform is None:
        chunks, layers = chosen.run.table.num_chunks, sum(chosen.sizes)
        lines.append(f"uniform stages  none: {layers} layers do not divide into {chunks} chunks")
    elif uniform.sizes != chosen.sizes:
        lines.append(f"uniform stages  {_uniform_against(uniform, chosen, limit)}")
    return "\n".join(lines) + "\n"


def _stage(prediction: PredictedStages, stage: int) -> str:
    table, times = prediction.run.table, prediction.times
    chunks = [str(layers) for layers in of_stage(table, prediction.sizes, stage)]
    forward, backward = (of_stages[stage] for of_stages in prediction.times_of_stages)
    noun = "layer" if chunks == ["1"] else "layers"
    text = f"{' + '.join(chunks)} {noun}: F {forward:.4g}, B {backward:.4g}"
    if table.lockstep:
        return f"{text}, head {times.head / table.num_stages:.4g}"
    return f"{text}, head {times.head:.4g}" if stage == table.stage_of_chunk[-1] else text


def _uniform_against(uniform: PredictedStages, chosen: PredictedStages, limit: float | None) -> str:
    run = uniform.run
    text = (
        f"{sum(of_stage(run.table, uniform.sizes, 0))} layers each: makespan {run.makespan:.6g} "
        f"({run.makespan / chosen.run.makespan - 1:+.1%}), "
        f"bubble {run.bubble:.4g} ({run.bubble_fraction:.1%}), slowest stage {uniform.slowest:.4g}"
    )
    if limit is None:
        return text
    peak = uniform.memory.max()
    return f"{text}, {peak / GIB:.3g} GiB{', which is too much' if peak > limit else ''}"


def _devices(config: Config) -> tuple[int, int]:
    topology, slices = config.compile.topology, config.compile.num_slices
    if topology not in ("", "cpu"):
        return num_devices(canonical_topology(topology)) * slices, slices
    ici, dcn = (
        math.prod(max(size, 1) for size in astuple(axes))
        for axes in (config.mesh.ici, config.mesh.dcn)
    )
    return ici * dcn, dcn
