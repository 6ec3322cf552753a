"""Closed forms give the numbers that were recorded, for a model whose sizes are made by hand.

So they do not depend on how JAX traces a layer. After a deliberate change, this file run as a
program records anew; the difference shows which parts of which engines the change reaches.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from helpers.engines import keys

from maxpipe.config import Config, replace
from maxpipe.config.sections import MESH_AXES
from maxpipe.plan.device_parameters import Parameters
from maxpipe.plan.layer_costs import LayerCosts, Saving
from maxpipe.plan.search.block import BlockSizes, block_of
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.memory import memory_bytes, program_memory
from maxpipe.plan.search.pricing import Outcome, only_legal
from maxpipe.plan.search.space import Space
from maxpipe.plan.search.timing import first_layers, step_seconds, unit_waits, units_of, waits_of
from maxpipe.plan.search.traffic import layer_traffic, once_seconds

RECORDED = Path(__file__).with_name("closed_forms.json")
MODEL = keys(
    "num_layers=18 embed_dim=1024 head_dim=128 num_query_heads=8 num_kv_heads=4 vocab_size=32000 "
    "dtype=bfloat16 sequence_length=2048 global_batch_size=64"
) | {"eval.every": 0}
MIXTURE = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.first_dense_layers": 2}
SINGLE = MIXTURE | {"model.num_layers": 6}
WIDE = {"model.embed_dim": 8192}
LOOP = {"pipeline.scan_layers_per_stage": True}
DELAYED = {"pipeline.delay_activation_forwarding": True}
V5P, V6E, SLICES = ("v5p:2x2x2", 1), ("v6e:2x4", 1), ("v5p:2x2x1", 2)
DCN_STAGES = {"fsdp": 4, "dcn.stage": 2}
FSDP, MIXED = {"stage": 2, "fsdp": 4}, {"stage": 2, "fsdp": 2, "data": 2}
# Engine, schedule, keys, mesh, machine.
CASES = {
    "sequential": ("sequential", "", {}, {"fsdp": 4, "data": 2}, V5P),
    "sequential whole": ("sequential", "", {}, {"data": 4, "tensor": 2}, V5P),
    "unrolled": ("sequential", "", {"pipeline.scan_layers": False}, {"fsdp": 8}, V5P),
    "cube": ("sequential", "", {}, {"fsdp": 64}, ("v5p:4x4x4", 1)),
    "context": ("sequential", "", {}, {"fsdp": 2, "context": 4}, V6E),
    "experts": ("sequential", "", MIXTURE, {"expert": 2, "fsdp": 4}, V5P),
    "circular": ("circular", "circular", {}, FSDP, V5P),
    "circular copies": ("circular", "gpipe", DELAYED, {"stage": 4, "data": 2}, V5P),
    "circular slices": ("circular", "circular", {}, {"stage": 2, "fsdp": 2, "dcn.data": 2}, SLICES),
    "circular first": ("circular", "circular", MIXTURE, MIXED, V5P),
    "lockstep": ("scheduled", "lockstep_1f1b", {}, FSDP, V6E),
    "lockstep whole": ("scheduled", "lockstep_1f1b", {}, {"stage": 4, "tensor": 2}, V5P),
    "lockstep cores": ("scheduled", "lockstep_1f1b", {}, MIXED, ("tpu7x:2x2x1", 1)),
    "lockstep delayed": ("scheduled", "lockstep_1f1b", DELAYED | MIXTURE, MIXED, V5P),
    "lockstep zb": ("scheduled", "lockstep_zb", MIXTURE, {"stage": 2, "expert": 4}, V5P),
    "lockstep slices": ("scheduled", "lockstep_1f1b", WIDE, DCN_STAGES, SLICES),
    "delayed slices": ("scheduled", "lockstep_1f1b", WIDE | DELAYED, DCN_STAGES, SLICES),
    "single layers": ("scheduled", "lockstep_1f1b", SINGLE, {"stage": 2, "data": 4}, V5P),
    "single layers split": ("scheduled", "lockstep_1f1b", SINGLE, FSDP, V5P),
    "circular loop": ("circular", "circular", SINGLE | LOOP, {"stage": 2, "tensor": 4}, V5P),
    "circular tensor": ("circular", "circular", {}, {"stage": 2, "tensor": 2, "data": 2}, V5P),
    "1f1b": ("mpmd", "1f1b", {}, FSDP, V6E),
    "zb_v": ("mpmd", "zb_v", {"model.tie_embeddings": True}, MIXED, V6E),
    "interleaved": ("mpmd", "interleaved_1f1b", MIXTURE, {"stage": 2, "data": 4}, V6E),
    "gpipe scores": ("mpmd", "gpipe", {"model.num_layers": 19}, MIXED, ("H100:8", 1)),
}


class HandMade:
    """Facts with sizes in the ratios of a model's, each a number of its own."""

    def __init__(self, config, *, holds_scores=False, is_first=False):
        self.config, self.holds_scores = config, holds_scores
        self.is_mixture = config.model.moe.experts > 0 and not is_first
        has_first = config.model.first_dense_layers and not is_first
        self.of_first_layers = HandMade(config, is_first=True) if has_first else None
        self.trained, self.head_flops = self, 2.0 * 1024 * 32000

    def parameters(self, axes):
        size = dict(zip(MESH_AXES, axes, strict=True))
        whole = size["tensor"]
        layer = (31e6 if self.is_mixture else 11e6) / whole / size["expert"]
        embed, head, parts = 33e6 / whole, 32e6 / whole, size["fsdp"] * size["stage"]
        stages = self.config.model.stacked_layers / size["stage"]
        return Parameters(
            at_rest=stages * layer / size["fsdp"] + (embed + head) / parts,
            layer_at_rest=layer / size["fsdp"],
            layer_over_fsdp=layer,
            layer_gathered=layer,
            layer_outside=layer / parts,
            ends_at_rest=(embed + head) / parts,
            ends_over_fsdp=(embed + head) / size["stage"],
            embed_gathered=embed,
            head_gathered=head,
            embed_of_stage=embed / size["fsdp"],
            head_of_stage=head / size["fsdp"],
            projection=head + 0.3e6,
            shared_at_rest=1.1 * head / parts,
            shared=1.1 * head,
        )

    def layer(self, axes):
        size = dict(zip(MESH_AXES, axes, strict=True))
        experts = 14e6 / size["tensor"] if self.is_mixture else 0.0
        return LayerCosts(
            weight_flops=23e6 / size["tensor"] + experts,
            attention_flops=8.5e6 / size["tensor"],
            scores=8.0 * 2048 if self.holds_scores else 0.0,
            expert_flops=experts,
            expert_weights=0.7 * experts / size["expert"],
            results=13000.0,
            made=17000.0 if self.holds_scores else 13000.0,
            elementwise=6200.0,
            rows=4100.0 if self.is_mixture else 0.0,
            key_values=1024.0 / size["tensor"],
            working=29000.0 + 0.5 * experts / 1e4,
        )

    def saving(self, axes, engine, policy, *, scans):
        kept = {"full": 0.0, "minimal": 7000.0, "none": 15000.0}[policy]
        again = {"full": 1.0, "minimal": 0.2, "none": 0.0}[policy]
        return Saving(
            residuals=kept,
            offloaded=0.0,
            stash=5100.0 + kept / 9,
            handed_over=8300.0 + kept / 7,
            saves_all=float(policy == "none"),
            held=kept + 4000.0 * again,
            cheap=2500.0,
            recomputed=again,
            scores_again=float(self.holds_scores and policy == "minimal"),
            first_kept=2.2 * kept,
            first_handed_over=9100.0,
            first_recomputed=0.9 * again,
        )


def block_and_machine(engine, schedule, keys, mesh, topology):
    config = replace(Config(), **MODEL | keys)
    machine = machine_of(*topology, config)
    choices = {f"mesh.ici.{axis}": [mesh.get(axis, 1)] for axis in MESH_AXES}
    choices |= {f"mesh.dcn.{axis}": [mesh.get(f"dcn.{axis}", 1)] for axis in MESH_AXES}
    choices |= {"pipeline.remat_policy": ["full", "minimal", "none"], "model.logit_tiles": [1, 4]}
    choices |= {"pipeline.num_microbatches": [1, 2, 4, 8, 16], "pipeline.num_repeats": [1, 2, 9]}
    space = Space(config, machine.devices, machine.slices, choices)
    (grid,) = space.grids()
    scans = config.pipeline.scan_layers
    block = block_of(space, grid, engine, schedule or "gpipe", 64, scans=scans)
    block = only_legal(block, Legality(config), Outcome().fallen)
    facts = HandMade(config, holds_scores=machine.chip.torus is None)
    return BlockSizes(block, facts, machine.tpu), machine


def figures(name):
    """Return for each closed form its least, mean and largest number, and the first's."""
    sizes, machine = block_and_machine(*CASES[name])
    units, waits = units_of(sizes, machine), waits_of(sizes, machine)
    in_forward, in_backward = unit_waits(sizes, units, waits)
    groups = {
        "units": units,
        "waits": waits,
        "traffic": layer_traffic(
            sizes, machine, sizes.parameters, sizes.layer, sizes.saving.residuals
        ),
        "step": step_seconds(sizes, machine),
    }
    numbers = {
        "memory": memory_bytes(sizes),
        "once": once_seconds(sizes, machine),
        "first layers": first_layers(sizes, machine),
        "waits of forward": in_forward,
        "waits of backward": in_backward,
        **{
            f"{group}.{k}": n for group, found in groups.items() for k, n in found._asdict().items()
        },
    }
    if sizes.engine.one_program:
        numbers |= {f"memory.{k}": number for k, number in asdict(program_memory(sizes)).items()}
    columns = {key: np.broadcast_to(n, len(sizes.block)) for key, n in numbers.items()}
    summaries = {key: [c.min(), c.mean(), c.max(), c[0]] for key, c in columns.items()}
    summaries["candidates"] = [len(sizes.block)]
    return {
        f"{name}: {key}": [float(f"{number:.10g}") for number in summary]
        for key, summary in summaries.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_closed_forms_are_those_recorded(name):
    recorded = json.loads(RECORDED.read_text())
    recorded = {key: numbers for key, numbers in recorded.items() if key.startswith(f"{name}: ")}
    found = figures(name)
    assert found.keys() == recorded.keys()
    differ = [
        key
        for key, numbers in recorded.items()
        if found[key] != pytest.approx(numbers, rel=1e-8, abs=1e-15)
    ]
    assert differ == []


if __name__ == "__main__":
    rows = [f"{json.dumps(k)}: {v}" for name in CASES for k, v in figures(name).items()]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
