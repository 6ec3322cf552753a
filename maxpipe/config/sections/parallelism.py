"""`mesh.*` and `sharding.*`: devices, their axes, and what is laid out over which axis.

`pipeline.*`: how layers become stages and batches become microbatches."""

from dataclasses import dataclass, field
from typing import Any

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.sections.fields import option

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
        1,
        "devices over which sequences are split; each gathers the keys and values of all",
        minimum=1,
        derived=True,
    )
    tensor: int = option(
        1, "devices over which heads and MLP width are split", minimum=1, derived=True
    )
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
        100,
        "seconds of silence after which a process counts as lost, which ends the others",
        minimum=5,
    )

    def size(self, axis: str) -> int:
        """Return the size of a mesh axis over all slices: ICI times DCN."""
        ici: int = getattr(self.ici, axis)
        dcn: int = getattr(self.dcn, axis)
        return ici * dcn


@dataclass(frozen=True)
class ShardingConfig:
    logical_axis_rules: list[Any] = option(DEFAULT_RULES, "list of [logical axis, [mesh axes]]")  # noqa: RUF009
    debug: bool = option(
        False, "print every sharding constraint of the step once, with logical and mesh axes"
    )


ENGINES = ("auto", "sequential", "circular", "scheduled", "mpmd")

_PLACES = ("remat", "device", "offload")


@dataclass(frozen=True)
class RematTensorsConfig:
    """Where each tensor of a decoder layer waits for the backward, with `remat_policy: custom`."""

    query_proj: str = option("remat", "projection to queries", choices=_PLACES)
    key_proj: str = option("remat", "projection to keys", choices=_PLACES)
    value_proj: str = option("remat", "projection to values", choices=_PLACES)
    context: str = option("remat", "output of attention before its projection", choices=_PLACES)
    out_proj: str = option("remat", "output projection of attention", choices=_PLACES)
    mlp_gate: str = option(
        "remat", "gate of the MLP, before its activation function", choices=_PLACES
    )
    mlp_up: str = option("remat", "what the gate multiplies", choices=_PLACES)
    mlp_down: str = option("remat", "output projection of the MLP", choices=_PLACES)


@dataclass(frozen=True)
class PipelineConfig:
    engine: str = option("auto", "what runs the schedule; auto picks by schedule", choices=ENGINES)
    schedule: str = option("circular", "order of work, or the path of a CSV file with one")
    num_microbatches: int = option(
        -1,
        "microbatches per step; -1 = stages (twice as many with delayed forwarding)",
        minimum=1,
        derived=True,
    )
    num_repeats: int = option(
        -1,
        "chunks of layers per stage; -1 = num_layers / (stages x num_layers_per_stage)",
        minimum=1,
        derived=True,
    )
    num_layers_per_stage: int = option(
        -1, "layers per chunk; -1 = num_layers / (stages x num_repeats)", minimum=1, derived=True
    )
    layers_per_stage: list[int] = option(  # noqa: RUF009
        [],
        "uneven chunks: layers of each chunk in model order; overrides the two keys above; auto = the slowest stage "
        "takes least (mpmd), num_repeats chunks per stage (-1 = 1)",
        derived=True,
    )
    memory_limit_gib: float = option(
        0,
        "with layers_per_stage auto: what a device may hold, by estimate; 0 = the chip's memory, if known",
        minimum=0,
    )
    parallel_layers: int = option(
        -1,
        "layers in the pipeline; the others run with stages as data parallelism; -1 = all",
        minimum=1,
        derived=True,
    )
    outside_layers: str = option(
        "after", "where layers outside the pipeline stand in the model", choices=("after", "before")
    )
    delay_activation_forwarding: bool = option(
        False, "forward activations a tick later so that transfers overlap with compute"
    )
    overlap_slots: bool = option(
        False, "a tick of slack between the last stage's forward and its backward"
    )
    skip_idle: str = option(
        "auto",
        "skip idle slots instead of computing them masked",
        choices=("auto", "true", "false"),
    )
    fsdp_gather: str = option(
        "per_iteration",
        "how often FSDP weights are gathered, and their gradients reduced",
        choices=("per_iteration", "per_repeat", "once"),
    )
    scan_iterations: bool = option(
        True, "iterations in a loop; false = copies, which compile slowly"
    )
    scan_repeats: bool = option(
        True, "with fsdp_gather per_repeat or once, repeats in a loop; false = copies"
    )
    scan_layers_per_stage: bool = option(
        False,
        "loop over the layers of a chunk: compiles faster, holds more memory; false = unroll them",
    )
    remat_policy: str = option("full", "what the backward recomputes", variants=REMAT_POLICIES)
    remat_iterations: bool = option(
        True, "remat_policy says what an iteration keeps; false = it keeps every intermediate value"
    )
    remat_layers: bool = option(
        False,
        "recompute layer by layer: one more pass, or with remat_iterations=false each layer's input kept",
    )
    remat_tensors: RematTensorsConfig = field(default_factory=RematTensorsConfig)
