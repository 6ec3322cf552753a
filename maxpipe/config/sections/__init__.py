"""Define the configuration: `Config` and its sections, in the order of the YAML file."""

from dataclasses import dataclass, field

from maxpipe.config.sections.fields import A_DIRECTORY, Bounds, option
from maxpipe.config.sections.model import ModelConfig
from maxpipe.config.sections.model_parts import LoRAConfig, MLAConfig, MoEConfig, RopeScalingConfig
from maxpipe.config.sections.parallelism import (
    MESH_AXES,
    AxesConfig,
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
        form="a name without a path: at most 255 letters, digits, '.', '_' and '-', first a letter "
        "or digit; output_dir takes the directory",
    )
    output_dir: str = option(
        "runs",
        "directory in which every run has its own directory",
        pattern=r"(?=.*\S)" + A_DIRECTORY["pattern"],
        form=f"{A_DIRECTORY['form']}; checkpoint.mirror keeps a copy of every checkpoint in an "
        "object store",
    )
    seed: int = option(
        0, "of initial parameters, dropout and the order of documents", minimum=0, maximum=MOST_SEED
    )
    steps: int = option(200, "number of training steps", minimum=1, maximum=2**31 - 1)
    epochs: float = option(
        0.0,
        "in place of steps, the number of passes over the training documents, which are counted "
        "before training",
        minimum=0,
    )
    stop_after: int = option(
        0, "end after this step as if the run were interrupted; 0 = run to the end", minimum=0
    )
    base_model: str = option(
        "",
        "the model to start from: its weights (init_from), shape, tokenizer and chat template; "
        "hf:DIR, hf:org/name or run:DIR; empty = as the keys of their own say",
    )
    init_from: str = option(
        "",
        "initial parameters, if the run has no checkpoint yet: hf:DIR (config.json and "
        "*.safetensors of a Hugging Face model), hf:org/name (a model of the hub), the same at "
        "s3://... or gs://..., run:DIR (newest step of another run), or maxtext:DIR (a step of "
        "MaxText); empty = random",
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
    "AxesConfig",
    "Bounds",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LoRAConfig",
    "MLAConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "RematTensorsConfig",
    "RopeScalingConfig",
    "ShardingConfig",
    "TelemetryConfig",
    "option",
]
