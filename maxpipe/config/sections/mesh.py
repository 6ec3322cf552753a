"""`mesh.*` and `sharding.*`: devices, their axes, and what is laid out over which axis."""

from dataclasses import dataclass, field
from typing import Any

from maxpipe.config.sections._option import option

MESH_AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")

DEFAULT_RULES: list[Any] = [
    ["activation_batch", ["data", "fsdp"]],
    ["activation_length", ["context"]],
    ["activation_stage", ["stage"]],
    ["stage", ["stage"]],
    ["repeat", []],
    ["layers_per_stage", []],
    ["embed", ["fsdp"]],
    ["outer_embed", ["stage", "fsdp"]],
    ["vocab", ["tensor"]],
    ["heads", ["tensor"]],
    ["kv_heads", ["tensor"]],
    ["head_dim", []],
    ["mlp", ["tensor"]],
    ["norm", []],
]


@dataclass(frozen=True)
class AxesConfig:
    """Sizes of the mesh axes; one of them may be -1 = whatever devices are left."""

    data: int = option(1, "replicas that share no parameter shards", minimum=1, derived=True)
    stage: int = option(1, "pipeline stages", minimum=1, derived=True)
    fsdp: int = option(
        1, "devices over which parameters are sharded and batches split", minimum=1, derived=True
    )
    context: int = option(
        1, "devices over which sequences are split; each gathers the keys and values of all", minimum=1, derived=True
    )
    tensor: int = option(1, "devices over which heads and MLP width are split", minimum=1, derived=True)
    expert: int = option(1, "devices over which experts are split", minimum=1, derived=True)


@dataclass(frozen=True)
class MeshConfig:
    ici: AxesConfig = field(default_factory=AxesConfig)
    dcn: AxesConfig = field(default_factory=AxesConfig)
    simulated_devices: int = option(
        0,
        "pretend to have so many devices, over all processes, when the backend is CPU; 0 = the real ones",
        minimum=0,
    )
    heartbeat_timeout_seconds: int = option(
        100, "seconds of silence after which a process counts as lost, which ends the others", minimum=5
    )


@dataclass(frozen=True)
class ShardingConfig:
    logical_axis_rules: list[Any] = option(DEFAULT_RULES, "list of [logical axis, [mesh axes]]")  # noqa: RUF009
    debug: bool = option(False, "print every sharding constraint of the step once, with logical and mesh axes")
