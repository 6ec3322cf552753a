"""Translate the mesh, the batch, the pipeline and rematerialisation."""

import math
from collections.abc import Sequence

from maxpipe.config.maxtext import AXES, KEYS, TENSORS
from maxpipe.config.sections import MESH_AXES
from maxpipe.config.slices import canonical_topology, num_chips
from maxpipe.migration.model import block_of
from maxpipe.migration.translator import Translator

_SAVED = tuple(dict.fromkeys(TENSORS.values()))
_NOT_CONTEXT = tuple(tensor for tensor in _SAVED if tensor != "context")
_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "out_proj")
# MaxText's policy -> the policy here that saves the same tensors.
_SAME = ("full", "qkv_proj_offloaded", "save_dot_except_mlp", "save_out_proj", "save_qkv_proj")
POLICIES = {name: name for name in _SAME} | {
    "": "none",
    "minimal_with_context": "minimal",
    "minimal_flash": "minimal",
}
# MaxText's policy -> where it saves which tensors, for policies that have no name here.
CUSTOM_POLICIES = {
    "minimal": ("device", _NOT_CONTEXT),
    "minimal_offloaded": ("offload", _NOT_CONTEXT),
    "save_dot_with_context_except_mlp": ("device", (*_PROJECTIONS, "context")),
    "save_dot_except_mlpwi": ("device", (*_PROJECTIONS, "mlp_down")),
}


def translate_devices(t: Translator) -> None:
    """Set the number of devices, unless the caller gave it, and the topology to compile for.

    It is the size of `compile_topology`, or else the product of a mesh without -1.
    """
    sizes = {level: [axis_size(t, level, axis) for axis in MESH_AXES] for level in ("ici", "dcn")}
    slices = max(t.integer("compile_topology_num_slices"), t.integer("num_slices"))
    if slices < 1:
        slices = math.prod(sizes["dcn"]) if -1 not in sizes["dcn"] else 1
    t.num_slices = max(1, slices)
    chips = 0
    if t.text("compile_topology"):
        try:
            topology = canonical_topology(t.text("compile_topology"))
            chips = num_chips(topology)
            t.set("compile.topology", topology, "compile_topology")
            if t.num_slices > 1:
                t.set("compile.num_slices", t.num_slices, "compile_topology_num_slices")
        except ValueError as error:
            t.refuse("compile_topology", str(error))
    if not t.num_devices:
        product = math.prod(sizes["ici"]) if -1 not in sizes["ici"] else 0
        t.num_devices = (chips or product) * t.num_slices
    if t.text("hardware") == "cpu" and t.num_devices > 1:
        t.set("mesh.simulated_devices", t.num_devices, "hardware")


def axis_size(t: Translator, level: str, axis: str) -> int:
    """Return the size of a mesh axis of ours within slices (ici) or over them (dcn), perhaps -1."""
    sizes = [t.integer(key, 1) for key in _axis_keys(level, axis)]
    return -1 if -1 in sizes else math.prod(sizes)


def _axis_keys(level: str, axis: str) -> list[str]:
    return [f"{level}_{word}_parallelism" for word, ours in AXES.items() if ours == axis]


def translate_mesh(t: Translator) -> None:
    """Set `mesh.ici` and `mesh.dcn`; -1 stays, since both programs fit that axis to the devices."""
    for level in ("ici", "dcn"):
        for axis in MESH_AXES:
            size = axis_size(t, level, axis)
            if size != 1:
                t.set(f"mesh.{level}.{axis}", size, *_axis_keys(level, axis))
    if "mesh.ici.context" in t.values and t.text("context_parallel_strategy") == "ring":
        t.set("sharding.context_strategy", "ring", "context_parallel_strategy")


def translate_batch(t: Translator) -> None:
    size = t.number("per_device_batch_size")
    if not t.num_devices:
        remedy = "add --devices N, or give every ici_*_parallelism a size"
        t.refuse("per_device_batch_size", f"is a number for each device; {remedy}")
        return
    accumulated = max(1, t.integer("gradient_accumulation_steps", 1))
    batch = int(t.num_devices * size) * accumulated
    t.set("data.global_batch_size", batch, "per_device_batch_size", "gradient_accumulation_steps")
    factors = f"{size:g} x {t.num_devices} devices" + (f" x {accumulated}" * (accumulated > 1))
    t.notes.append(f"data.global_batch_size={batch}: {factors}")
    eval_size = t.number("eval_per_device_batch_size") or size
    eval_batch = int(t.num_devices * eval_size)
    if t.integer("eval_interval", -1) > 0 and eval_batch != batch:
        t.set("eval.global_batch_size", eval_batch, "eval_per_device_batch_size")


def translate_pipeline(t: Translator) -> None:
    """Set the pipeline's layout if there are stages, else the microbatches to accumulate."""
    accumulated = max(1, t.integer("gradient_accumulation_steps", 1))
    stages = abs(axis_size(t, "ici", "stage") * axis_size(t, "dcn", "stage"))
    if stages == 1 and axis_size(t, "ici", "stage") != -1:
        if accumulated > 1:
            t.set("pipeline.num_microbatches", accumulated, "gradient_accumulation_steps")
        t.copy("scan_layers")
        return
    t.set("pipeline.schedule", "circular", "ici_pipeline_parallelism")
    t.copy("num_pipeline_repeats")
    block = block_of(t)
    for key in ("num_layers_per_pipeline_stage", "pipeline_parallel_layers"):
        count = t.integer(key, -1)
        t.set(KEYS[key].ours, count * (block.num_layers if block and count != -1 else 1), key)
    is_delayed = t.is_on("pipeline_delay_activation_forwarding")
    microbatches = t.integer("num_pipeline_microbatches", -1)
    if accumulated > 1:
        microbatches = stages * (2 if is_delayed else 1) if microbatches == -1 else microbatches
        message = f"{accumulated} x {microbatches} microbatches go through the pipeline in one pass"
        t.note("gradient_accumulation_steps", message)
        microbatches *= accumulated
    origins = ("num_pipeline_microbatches", "gradient_accumulation_steps")
    t.set("pipeline.num_microbatches", microbatches, *origins)
    t.copy("pipeline_delay_activation_forwarding")
    gather = "once" if t.is_on("pipeline_fsdp_ag_once") else "per_iteration"
    if t.is_on("pipeline_fsdp_ag_per_repeat"):
        gather = "per_repeat"
    t.set("pipeline.fsdp_gather", gather, "pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat")
    t.copy(
        "scan_pipeline_iterations",
        "set_remat_policy_on_pipeline_iterations",
        "set_remat_policy_on_layers_per_stage",
        "scan_layers_per_stage",
    )


def translate_remat(t: Translator) -> None:
    """Set the policy that saves the tensors that MaxText's policy saves."""
    name = t.text("remat_policy")
    if name in POLICIES:
        t.set("pipeline.remat_policy", POLICIES[name], "remat_policy")
        return
    if name == "custom":
        words = {tensor: [key for key in TENSORS if TENSORS[key] == tensor] for tensor in _SAVED}
        places = {tensor: _place(t, keys) for tensor, keys in words.items()}
    elif name in CUSTOM_POLICIES:
        place, tensors = CUSTOM_POLICIES[name]
        places, words = dict.fromkeys(tensors, place), {key: ["remat_policy"] for key in tensors}
    else:
        legal = ", ".join([*filter(None, POLICIES), *CUSTOM_POLICIES, "custom"])
        t.refuse("remat_policy", f"{name} is not among {legal}")
        return
    t.set("pipeline.remat_policy", "custom", "remat_policy")
    for tensor, place in places.items():
        if place != "remat":
            t.set(f"pipeline.remat_tensors.{tensor}", place, *words[tensor])


def _place(t: Translator, words: Sequence[str]) -> str:
    """Return where a tensor is saved that MaxText knows under several names."""
    places = [t.text(word) for word in words]
    unknown = next((place for place in places if place not in ("", "remat")), "remat")
    return "device" if "device" in places else unknown
