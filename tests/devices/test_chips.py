from types import SimpleNamespace

from maxpipe.devices.chips import (
    GIB,
    chip_for,
    device_memory,
    explain_quantisation,
    topology_memory,
)

PEAKS = {
    "TPU v4": ("v4", 275),
    "TPU v5 lite": ("v5e", 197),
    "TPU v5e": ("v5e", 197),
    "TPU v5": ("v5p", 459),
    "TPU v5p": ("v5p", 459),
    "TPU v6 lite": ("v6e", 918),
    "TPU v6e": ("v6e", 918),
    "TPU7x": ("tpu7x", 2307),
    "NVIDIA A100-SXM4-80GB": ("A100", 312),
    "NVIDIA H100 80GB HBM3": ("H100", 989.4),
    "NVIDIA H200": ("H200", 989.4),
    "NVIDIA B200": ("B200", 2250),
}
UNKNOWN = """cpu, TPU v2, TPU v4 lite, NVIDIA H100 PCIe, NVIDIA H100 NVL, NVIDIA A100-SXM4-40GB,
NVIDIA A100-SXM-64GB, NVIDIA H100 64GB HBM2, NVIDIA H100 80GB HBM3 MIG 1g.10gb, NVIDIA GB200,
NVIDIA GeForce RTX 4090"""


def test_device_kinds_of_jax_are_known_with_their_peaks():
    chips = {kind: chip_for(kind) for kind in PEAKS}
    found = {kind: (c.name, c.peak_flops["bfloat16"] / 1e12) for kind, c in chips.items() if c}
    assert found == PEAKS
    others = UNKNOWN.replace("\n", " ").split(", ")
    assert {kind: chip_for(kind) for kind in others} == dict.fromkeys(others)


def test_chips_without_units_for_fp8_are_said_to_be_slower_with_it():
    named = {"TPU v4": "TPU v4", "TPU v5 lite": "TPU v5e", "TPU v6 lite": "TPU v6e"}
    named |= {"NVIDIA A100-SXM4-80GB": "NVIDIA A100-SXM4-80GB"}
    have = ("TPU7x", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "cpu")
    for kind in (*named, *have):
        device = SimpleNamespace(device_kind=kind, platform="")
        said = [
            f"{named[kind]} has no units for fp8: model.quantisation=fp8 is slower than bfloat16"
            for _ in range(kind in named)
        ]
        assert explain_quantisation("fp8", device) == said
        assert explain_quantisation("int8", device) == explain_quantisation("none", device) == []


def test_devices_that_share_a_chip_share_its_memory():
    def cores(count, per_chip):
        kind = "TPU v4"
        return [
            SimpleNamespace(device_kind=kind, platform="tpu", coords=(i // per_chip, 0, 0))
            for i in range(count)
        ]

    whole = chip_for("TPU v4").hbm_bytes
    assert device_memory(cores(4, 1)) == whole
    assert device_memory(cores(4, 2)) == whole / 2
    assert device_memory([SimpleNamespace(device_kind="cpu", platform="cpu")]) is None


def test_topology_memory_is_that_of_one_of_the_chip_s_devices():
    assert topology_memory("v5p:4x4x4") == 95 * GIB
    assert topology_memory("tpu7x:2x2x1") == 192 * GIB / 2
    assert topology_memory("cpu") is None
