"""Configure how training is spread over devices: `mesh.*`, `sharding.*` and `pipeline.*`."""

from dataclasses import dataclass, field
from typing import Any

from maxpipe.config.catalog import ENGINES, REMAT_POLICIES
from maxpipe.config.sections.fields import amount, automatic, derived, option

MESH_AXES = ("data", "stage", "fsdp", "context", "tensor", "expert")

DEFAULT_RULES: list[list[str | list[str]]] = [
    ["activation_batch", ["data", "fsdp", "expert"]],
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
    ["latent", ["fsdp"]],
    ["mlp", ["tensor"]],
    ["norm", []],
    ["expert", ["expert"]],
    ["expert_embed", ["fsdp"]],
    ["expert_mlp", ["tensor"]],
    ["router", []],
    ["expert_bias", []],
    ["adapter_rank", []],
]


def _axis(help: str) -> Any:
    return option(1, f"{help}; -1 = what the other axes leave", minimum=1, derived=True)


@dataclass(frozen=True)
class AxesConfig:
    """Sizes of the mesh axes; one of them may be -1 = the devices that the other axes leave."""

    data: int = _axis("groups of devices, each with its own copy of the parameters")
    stage: int = _axis("pipeline stages")
    fsdp: int = _axis("devices over which both parameters and batches are split")
    context: int = _axis("devices over which sequences are split; see sharding.context_strategy")
    tensor: int = _axis("devices over which heads and MLP width are split")
    expert: int = _axis("devices over which experts and batches are split")


@dataclass(frozen=True)
class ElasticConfig:
    """`mesh.elastic.*`: how a supervised run goes on without hosts that do not come back."""

    axes: list[str] = option(
        [],
        "axes that shrink when a host is lost, the first one first; empty = none",
        choices=("data", "fsdp"),  # they split rows, but no dimension that the model needs split
        needs="checkpoint.every or checkpoint.every_minutes",
    )
    wait_seconds: float = amount(120.0, "seconds for which the others wait for a lost host")


@dataclass(frozen=True)
class MeshConfig:
    """`mesh.*`: axes within a slice (ici) and over slices (dcn)."""

    ici: AxesConfig = field(default_factory=AxesConfig)
    dcn: AxesConfig = field(default_factory=AxesConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    simulated_devices: int = amount(
        0, "devices that CPUs pretend to have, over all processes; 0 = the real ones"
    )
    heartbeat_timeout_seconds: int = option(
        100, "seconds of silence after which a process counts as lost", minimum=5
    )

    def size(self, axis: str) -> int:
        """Return the size of a mesh axis over all slices: ICI times DCN."""
        ici: int = getattr(self.ici, axis)
        dcn: int = getattr(self.dcn, axis)
        return ici * dcn


@dataclass(frozen=True)
class ShardingConfig:
    logical_axis_rules: list[Any] = option(DEFAULT_RULES, "list of [logical axis, [mesh axes]]")
    context_strategy: str = option(
        "auto",
        "gather keys of split sequences, or pass them around a ring; auto = on TPUs by memory",
        choices=("auto", "gather", "ring"),
        acts_with="mesh.ici.context>1 or mesh.dcn.context>1",
    )
    debug: bool = option(False, "print each sharding constraint of the step once")


def _remat(help: str) -> Any:
    return option("remat", help, choices=("remat", "device", "offload"))


@dataclass(frozen=True)
class RematTensorsConfig:
    """Whether each tensor of a layer is recomputed or saved, with `remat_policy: custom`."""

    query_proj: str = _remat("projection to queries")
    key_proj: str = _remat("projection to keys")
    value_proj: str = _remat("projection to values")
    context: str = _remat("output of attention before its projection")
    out_proj: str = _remat("output projection of attention")
    mlp_gate: str = _remat("gate of the MLP, before its activation function")
    mlp_up: str = _remat("projection of the MLP that is multiplied by the gate")
    mlp_down: str = _remat("output projection of the MLP")


@dataclass(frozen=True)
class PipelineConfig:
    """`pipeline.*`; the catalogue says which engines take which of the keys."""

    engine: str = option("auto", "engine; auto picks by schedule", variants=ENGINES, also=("auto",))
    schedule: str = option("circular", "name of a schedule, or the path of a CSV file with one")
    num_microbatches: int = derived(
        "microbatches per step; -1 = stages (twice as many with delayed forwarding)"
    )
    num_repeats: int = derived("chunks per stage; -1 = layers / (stages x num_layers_per_stage)")
    num_layers_per_stage: int = derived("layers per chunk; -1 = layers / (stages x num_repeats)")
    layers_per_stage: list[int] = option(
        [], "layers of each chunk, for mpmd; empty = equal; auto = the fastest", derived=True
    )
    unit_times: list[float] = option(
        [], "times of F, I, W, transfer, head; auto = by FLOPs", derived=True
    )
    memory_limit_gib: float = amount(
        0,
        "memory of a device for auto stages; 0 = the chip's",
        acts_with="pipeline.layers_per_stage=auto",
    )
    parallel_layers: int = derived("layers in the pipeline, others outside it; -1 = all")
    outside_layers: str = option(
        "after",
        "whether layers outside the pipeline come first or last",
        choices=("after", "before"),
    )
    delay_activation_forwarding: bool = option(False, "send activations a tick later, to overlap")
    overlap_slots: bool = option(False, "a tick between the last forward and backward, to overlap")
    skip_idle: str = automatic("skip idle slots instead of masking them; auto = on CPU devices")
    fsdp_gather: str = option(
        "auto",
        "how often FSDP weights are gathered and gradients scattered; auto = on TPUs by memory",
        choices=("auto", "per_iteration", "per_repeat", "once"),
    )
    fsdp_prefetch: str = automatic(
        "send a chunk's weights and gradients while it computes; auto = on TPUs, fsdp up to 8",
        acts_with="mesh.ici.fsdp>1 or mesh.dcn.fsdp>1",
    )
    scan_iterations: bool = option(True, "run iterations as a loop; unrolled, they compile slowly")
    scan_repeats: bool = option(
        True, "run repeats as a loop", needs="pipeline.fsdp_gather=per_repeat|once"
    )
    scan_layers: bool = option(True, "run layers of the sequential engine as a loop")
    scan_layers_per_stage: bool = option(False, "layers of a chunk as a loop, to compile faster")
    remat_policy: str = option(
        "full",
        "tensors that a layer saves for its backward; others are recomputed",
        variants=REMAT_POLICIES,
    )
    remat_iterations: bool = option(
        True, "recompute within iterations; false = as remat_policy=none"
    )
    remat_layers: bool = option(False, "recompute layer by layer: less memory, one more forward")
    remat_cheap: str = automatic("recompute norms and gates layer by layer; auto by memory")
    remat_tensors: RematTensorsConfig = field(default_factory=RematTensorsConfig)

    @property
    def forwarding_delay(self) -> int:
        """Return how many ticks or iterations a transfer between stages takes."""
        return 2 if self.delay_activation_forwarding else 1

    @property
    def gathers_whole(self) -> bool:
        """Return whether weights of a repeat or more are gathered at once; False for auto."""
        return self.fsdp_gather in ("per_repeat", "once")
