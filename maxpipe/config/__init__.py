"""Configure a run: typed sections, YAML with inheritance, overrides, all problems at once.

Nothing here imports JAX.
"""

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import Loaded, load, replace, resolve
from maxpipe.config.printing import notes, print_config, to_yaml
from maxpipe.config.sections import (
    MESH_AXES,
    AxesConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RematTensorsConfig,
    RopeScalingConfig,
    ShardingConfig,
    TelemetryConfig,
)

__all__ = [
    "MESH_AXES",
    "AxesConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "Loaded",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "Problem",
    "RematTensorsConfig",
    "RopeScalingConfig",
    "ShardingConfig",
    "TelemetryConfig",
    "load",
    "notes",
    "print_config",
    "replace",
    "resolve",
    "to_yaml",
]
