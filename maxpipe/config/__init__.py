"""Configure a run: YAML with inheritance, overrides, all problems at once. Imports no JAX."""

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import Loaded, load, replace, resolve
from maxpipe.config.printing import notes, print_config, to_yaml
from maxpipe.config.sections import (
    MESH_AXES,
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RematTensorsConfig,
    RopeScalingConfig,
)

__all__ = [
    "MESH_AXES",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "Loaded",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "Problem",
    "RematTensorsConfig",
    "RopeScalingConfig",
    "load",
    "notes",
    "print_config",
    "replace",
    "resolve",
    "to_yaml",
]
