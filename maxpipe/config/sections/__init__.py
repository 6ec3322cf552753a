"""Define the configuration: `Config` and its sections, in the order of the YAML file."""

from dataclasses import dataclass, field

from maxpipe.config.sections.fields import amount, directory, option
from maxpipe.config.sections.model import ModelConfig
from maxpipe.config.sections.model_parts import LoRAConfig, MLAConfig, MoEConfig, RopeScalingConfig
from maxpipe.config.sections.parallelism import (
    MESH_AXES,
    MeshConfig,
    PipelineConfig,
    RematTensorsConfig,
    ShardingConfig,
)
from maxpipe.config.sections.training import (
    CheckpointConfig,
    CompileConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    TelemetryConfig,
)

MOST_SEED = 2**32 - 1  # JAX truncates larger seeds to 32 bits


@dataclass(frozen=True)
class Config:
    """The configuration of a run.

    After `maxpipe.config.resolve` no key is -1 any more, except with automatic stages.
    """

    run_name: str = option(
        "base",
        "name of the run and its directory: letters, digits, '.', '_' and '-'",
        pattern="[A-Za-z0-9][A-Za-z0-9._-]{0,254}",
        form="a name of at most 255 letters, digits, '.', '_' and '-', first a letter or digit",
    )
    output_dir: str = directory("runs", "directory in which every run has its own directory")
    seed: int = amount(0, "of parameters, dropout and the order of documents", maximum=MOST_SEED)
    steps: int = option(200, "number of training steps", minimum=1, maximum=2**31 - 1)
    epochs: float = amount(0.0, "passes over the training documents, in place of steps")
    stop_after: int = amount(0, "end after this step as if interrupted; 0 = run to the end")
    base_model: str = option("", "the model to start from, whole: hf:DIR, hf:org/name or run:DIR")
    init_from: str = option(
        "",
        "initial parameters of a new run: hf:DIR, hf:org/name, s3://... or gs://... (safetensors), "
        "run:DIR (newest step of a run), or maxtext:DIR (a step of MaxText); empty = random",
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)


__all__ = [
    "MESH_AXES",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoRAConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RematTensorsConfig",
    "RopeScalingConfig",
    "TelemetryConfig",
]
