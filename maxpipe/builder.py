"""From configuration to mesh, model and engine: the one place where the parts are put together."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from maxpipe.config.sections import Config
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.circular import CircularPipeline
from maxpipe.pipeline.contract import Parts, Pipeline
from maxpipe.pipeline.layout import StageLayout
from maxpipe.pipeline.sequential import SequentialPipeline
from maxpipe.sharding import AxisRules
from maxpipe.training.engine import Engine, SpmdEngine
from maxpipe.training.optimizer import Optimizer

PIPELINES: dict[str, Callable[[Parts], Pipeline]] = {
    "sequential": SequentialPipeline,
    "circular": CircularPipeline,
}


def build_layout(config: Config) -> StageLayout:
    """Which layer lives on which stage, from a resolved configuration."""
    if config.pipeline.engine == "sequential":
        return StageLayout.even(1, 1, config.model.num_layers)
    stages = config.mesh.ici.stage * config.mesh.dcn.stage
    if config.pipeline.layers_per_stage:
        return StageLayout(stages, config.pipeline.num_repeats, tuple(config.pipeline.layers_per_stage))
    return StageLayout.even(stages, config.pipeline.num_repeats, config.pipeline.num_layers_per_stage)


def build_engine(
    config: Config, mesh: Mesh, *, say: Callable[[str], None] = lambda text: None, **pipeline_options: Any
) -> Engine:
    """The engine of a resolved configuration.

    Args:
      config: resolved; `pipeline.engine` is no longer auto.
      mesh: from `build_mesh`.
      say: called with each automatic decision.
      pipeline_options: passed to the pipeline's constructor.
    """
    program = ModelProgram(config.model)
    rules = AxisRules(config.sharding.logical_axis_rules, mesh, say)
    parts = Parts(program, rules, config.pipeline, build_layout(config))
    pipeline = PIPELINES[config.pipeline.engine](parts, **pipeline_options)
    return SpmdEngine(program.specs, pipeline, rules, Optimizer(config.optimizer, program.specs))
