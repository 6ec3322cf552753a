"""The report at the start of a run, from what was built."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxpipe.builder import build_layout, build_table
from maxpipe.config.sections import Config, DataConfig
from maxpipe.pipeline.auto_stages.plan import predict
from maxpipe.pipeline.simulate import simulate
from maxpipe.telemetry.flops import parameter_count
from maxpipe.telemetry.summary import RunSummary, start_summary


def report(config: Config, mesh: Mesh, root: str, step: int, decisions: Sequence[str]) -> list[str]:
    """Lines about devices, model, stages, data and every automatic decision; at most 25.

    Args:
      config: resolved.
      mesh: the device mesh.
      root: the run's directory.
      step: finished steps.
      decisions: `key=value: reason`, one line each.
    """
    device = mesh.devices.flat[0]
    parameters = parameter_count(config.model)
    data = config.data
    tokens = data.global_batch_size * data.sequence_length
    pipelined = config.pipeline.engine != "sequential"
    layout = build_layout(config)
    stages = range(layout.num_stages) if pipelined else ()
    summary = RunSummary(
        run_dir=root,
        device_kind=device.device_kind,
        num_devices=mesh.size,
        num_processes=jax.process_count(),
        is_simulated=device.platform == "cpu" and mesh.size > jax.process_count(),
        mesh=dict(mesh.shape),
        num_parameters=parameters,
        parameter_bytes=parameters * jnp.dtype(config.model.param_dtype).itemsize,
        stage_layers=[[i for chunk in layout.stage_layers(s) for i in chunk] for s in stages],
        schedule=f"{config.pipeline.schedule} on the {config.pipeline.engine} engine" if pipelined else "sequential",
        num_microbatches=config.pipeline.num_microbatches,
        bubble=_bubble(config) if pipelined else 0.0,
        data=f"{describe_sources(data)}, {data.tokenizer} tokens, "
        f"{data.global_batch_size} x {data.sequence_length} = {tokens} a step",
        steps=config.steps,
        resumed_step=step or None,
        decisions=decisions,
    )
    return start_summary(summary)


def _bubble(config: Config) -> float:
    """Of equal chunks; on the MPMD engine, where one stage has the head, of what the stages hold."""
    if config.pipeline.engine != "mpmd":
        return simulate(build_table(config)).bubble_fraction
    return predict(config, build_layout(config).chunk_sizes).run.bubble_fraction


def describe_sources(data: DataConfig) -> str:
    """The source, or those of a mixture with their shares."""
    total = sum(entry["weight"] for entry in data.mixture)
    return " + ".join(f"{e['weight'] / total:.3g} {e['source']}" for e in data.mixture) or data.source
