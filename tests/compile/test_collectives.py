"""Counting collectives: on text made by hand, and on programs whose traffic is known."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxpipe.compile.collectives import axes_of, find_collectives, groups_of, sent_bytes
from maxpipe.compile.hlo import Instruction, parse


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "stage"))


GROUPS = {
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}": "fsdp",
    "replica_groups={{0,1,2,3},{4,5,6,7}}": "stage",
    "replica_groups=[2,4]<=[8], dimensions={0}": "stage",
    "replica_groups=[4,2]<=[2,4]T(1,0)": "fsdp",
    "replica_groups=mesh['a'=2,'b'=1,'c'=4] {'c'}, dimensions={1}": "stage",
    "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}": "fsdp",
    "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}": "fsdp,stage",
    "replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'b','a'}": "stage",
    "replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'c'}": "fsdp",
    "replica_groups={{0,1,2,3,4,5,6,7}}": "fsdp,stage",
    "replica_groups={}": "fsdp,stage",
    "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}": "stage",
    "source_target_pairs={{0,4},{4,0}}": "fsdp",
    "replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}": "",
}


def test_groups_are_named_by_the_mesh_axes_they_span(mesh):
    def axes(rest):
        instruction = Instruction("x", "all-gather", "f32[8]", (), "", f", {rest}")
        return axes_of(groups_of(instruction, 8), mesh.shape)

    assert {rest: axes(rest) for rest in GROUPS} == GROUPS


def test_tpu_text_is_counted_by_operand(mesh):
    """Read the TPU form: reduce-scatter is a fused all-reduce; asynchronous ones start and end."""
    text = """
%all-reduce-scatter.3 (input: f32[64]) -> f32[16] {
  %input = f32[64]{0:T(128)} parameter(0)
  %all-reduce.9 = f32[64]{0:T(128)} all-reduce(%input), replica_groups={{0,1,2,3},{4,5,6,7}}, \
to_apply=%add
  ROOT %slice = f32[16]{0} dynamic-slice(%all-reduce.9, %input), dynamic_slice_sizes={16}
}

ENTRY %main (a: bf16[32], b: f32[64]) -> f32[16] {
  %a = bf16[32]{0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %s = (bf16[32]{0}, bf16[32]{0}, u32[]{:S(2)}) collective-permute-start(%a), \
source_target_pairs={{0,1},{1,2}}
  %d = bf16[32]{0} collective-permute-done(%s)
  ROOT %f = f32[16]{0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
    found = {c.kind: c for c in find_collectives(parse(text), mesh)}
    assert set(found) == {"reduce-scatter", "collective-permute"}
    assert (found["reduce-scatter"].bytes, found["reduce-scatter"].sent_bytes) == (256, 192)
    assert (found["collective-permute"].count, found["collective-permute"].bytes) == (1, 64)
    assert {c.axes for c in found.values()} == {"stage"}


def test_a_ragged_collective_counts_the_rows_that_may_travel(mesh):
    text = """
ENTRY %main (a: bf16[32,4], b: bf16[64,4], n: s32[4]) -> bf16[32,4] {
  %a = bf16[32,4]{1,0} parameter(0)
  %b = bf16[64,4]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  %there = bf16[64,4]{1,0} ragged-all-to-all(%a, %b, %n, %n, %n, /*index=5*/%n), \
replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %back = bf16[32,4]{1,0} ragged-all-to-all(%there, %a, %n, %n, %n, /*index=5*/%n), \
replica_groups={{0,1,2,3},{4,5,6,7}}
}
"""
    (both,) = find_collectives(parse(text), mesh)
    assert (both.kind, both.axes, both.count) == ("ragged-all-to-all", "stage", 2)
    assert (both.bytes, both.sent_bytes) == (2 * 256, 2 * 192)


def test_a_collective_fused_with_what_it_overlaps_counts_once(mesh):
    gather = """
%NAME (a: bf16[8]) -> (bf16[8], bf16[32]) {
  %a = bf16[8]{0} parameter(0)
  ROOT %all-gather.NAME = bf16[32]{0} all-gather(%a), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}
"""
    names = "begin", "async_collective_fusion.2", "end"
    text = "".join(gather.replace("NAME", name) for name in names)
    text += """
ENTRY %main (a: bf16[8]) -> bf16[32] {
  %a = bf16[8]{0} parameter(0)
  %async-collective-start.4 = (bf16[8]{0}, bf16[32]{0}) fusion(%a), kind=kCustom, calls=%begin
  %fusion.2 = (bf16[32]{0}, f32[]) fusion(%async-collective-start.4), kind=kOutput, \
calls=%async_collective_fusion.2
  ROOT %async-collective-done.4 = bf16[32]{0} fusion(%fusion.2), kind=kCustom, calls=%end
}
"""
    (only,) = find_collectives(parse(text), mesh)
    assert (only.kind, only.axes, only.count) == ("all-gather", "stage", 1)
    assert (only.bytes, only.sent_bytes) == (16, 48)


def in_slices(slices, shape):
    devices = np.array([SimpleNamespace(slice_index=i) for i in slices], dtype=object)
    return SimpleNamespace(devices=devices.reshape(shape), axis_names=("stage", "fsdp"))


CROSSING = """
ENTRY %main (a: f32[2,128]) -> f32[2] {
  %a = f32[2,128] parameter(0)
  %token = token[] after-all()
  %near = f32[4,128] all-gather(%a), replica_groups={{0,1}}, dimensions={0}
  %send = (f32[2,128]{1,0:T(8,128)}, u32[], token[]) send(%a, %token), channel_id=2, \
is_host_transfer=true, frontend_attributes={TARGET_xla_megascale_transfer_type="KIND"}
  ROOT %done = token[] send-done(%send), channel_id=2, \
frontend_attributes={_xla_megascale_transfer_type="KIND"}
}
"""


def crossing(kind, target, mesh):
    words = target and f"_xla_megascale_target={target},"
    text = CROSSING.replace("KIND", kind.upper().replace("-", "_")).replace("TARGET", words)
    return {c.network: c for c in find_collectives(parse(text), mesh)}


def test_what_is_sent_to_other_slices_depends_on_the_collective():
    """By the slices that a target names, or all of them."""
    targets = {
        '"{1,2,3,4}x{0:0}"': 4,
        "{{100000,200000},{300000,400000}}": 2,
        "{{100000,100001,200000,200001}}": 2,
        "": 4,
    }
    mesh = in_slices(np.repeat(range(4), 2), (4, 2))
    for kind in ("all-gather", "all-to-all", "reduce-scatter", "all-reduce"):
        for target, slices in targets.items():
            found = crossing(kind, target, mesh)["dcn"]
            share = sent_bytes(kind, 1.0, slices)
            assert (found.bytes, found.sent_bytes) == (1024, share * 1024), (kind, target)


@pytest.mark.parametrize(
    ("slices", "across", "within"),
    [((0, 0, 1, 1), "stage", "fsdp"), ((0, 1, 0, 1), "fsdp", "stage")],
)
def test_what_crosses_slices_is_sent_by_the_hosts(slices, across, within):
    """Partitions are those of one slice."""
    found = crossing("all-gather", '"{1,2}x{0:3}"', in_slices(slices, (2, 2)))
    assert {network: c.axes for network, c in found.items()} == {"dcn": across, "ici": within}
    assert {c.kind for c in found.values()} == {"all-gather"}
    assert (found["dcn"].count, found["dcn"].sent_bytes) == (1, 1024)


def test_compiled_collectives_in_a_loop(mesh):
    def device(x):
        def tick(x, _):
            x = jax.lax.ppermute(x, "stage", [(s, (s + 1) % 4) for s in range(4)])
            whole = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
            return jax.lax.psum_scatter(
                whole * whole, "fsdp", scatter_dimension=0, tiled=True
            ), None

        return jax.lax.scan(tick, x, length=6)[0]

    specs = {"in_specs": P("fsdp"), "out_specs": P("fsdp"), "check_vma": False}
    f = jax.jit(jax.shard_map(device, mesh=mesh, **specs))
    compiled = f.lower(jax.ShapeDtypeStruct((64, 16), jnp.float32)).compile()
    found = {(c.kind, c.axes): c for c in find_collectives(parse(compiled.as_text()), mesh)}
    block = 32 * 16 * 4
    assert {key: (c.count, c.bytes) for key, c in found.items()} == {
        ("collective-permute", "stage"): (6, 6 * block),
        ("all-gather", "fsdp"): (6, 6 * block),
        ("reduce-scatter", "fsdp"): (6, 6 * 2 * block),
    }
    assert found["all-gather", "fsdp"].sent_bytes == 6 * block


def test_bytes_sent_by_ring_algorithms():
    expected = {"all-gather": 300, "all-reduce": 150, "reduce-scatter": 75}
    expected |= {"all-to-all": 75, "collective-permute": 100}
    assert {kind: sent_bytes(kind, 100, 4) for kind in expected} == expected
    assert {sent_bytes(kind, 100, 1) for kind in expected} == {0}
