"""When weights are gathered a slot ahead on auto, and what is said about it."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.fsdp_stages import V5P, Device, config_of

from maxpipe.devices.chips import device_memory
from maxpipe.planning import prefetch


def decided(device=V5P, ring=4, **values):
    """Return (decision, notes) for two stages with weights split over `ring` devices."""
    devices = np.array([device] * 2 * ring).reshape(2, ring)
    mesh = SimpleNamespace(shape={"stage": 2, "fsdp": ring}, devices=devices)
    notes = []
    return prefetch.gathers_ahead(config_of(**values), mesh, notes.append), notes


@pytest.mark.parametrize(
    ("share", "decision", "reason"), [(0.05, True, "at most 5%"), (1e-9, False, "more than 0%")]
)
def test_prefetch_on_auto_needs_a_small_share_of_a_tpu(share, decision, reason, monkeypatch):
    monkeypatch.setattr(prefetch, "MEMORY_SHARE", share)
    does, (note,) = decided()
    assert does is decision
    assert note.startswith(f"pipeline.fsdp_prefetch={str(decision).lower()}: ")
    assert reason in note


def test_prefetch_on_auto_avoids_long_rings_and_says_so():
    does, (note,) = decided(ring=8)
    assert not does
    assert "each of 8 devices of mesh axis fsdp" in note


def test_prefetch_on_auto_needs_a_known_memory():
    does, (note,) = decided(Device("TPU v99"))
    assert not does
    assert note == "pipeline.fsdp_prefetch=false: the memory of TPU v99 is not known"


@pytest.mark.parametrize(
    "values",
    [
        {"device": Device("cpu", "cpu")},
        {"ring": 1},
        {"pipeline.fsdp_gather": "once"},
        {"pipeline.scan_layers_per_stage": True},
        {
            "pipeline.engine": "circular",
            "pipeline.schedule": "circular",
            "pipeline.num_microbatches": 4,
        },
        {"pipeline.fsdp_prefetch": "false"},
    ],
    ids=["cpu", "whole_weights", "gathered_once", "loop_over_layers", "circular", "false"],
)
def test_prefetch_is_off_without_a_word_where_nothing_is_decided(values):
    values = {"model.num_layers": 4, "pipeline.num_layers_per_stage": 2} | values
    assert decided(**values) == (False, [])


def test_prefetch_as_told_needs_no_words():
    assert decided(**{"pipeline.fsdp_prefetch": "true"}) == (True, [])


def test_gathered_chunks_count_what_tensor_parallelism_leaves_to_a_device():
    notes = [decided(**{"mesh.ici.tensor": size, "model.mlp_dim": 2**24})[1][0] for size in (1, 2)]
    whole, half = (float(note.split("take ")[1].split()[0]) for note in notes)
    assert whole > 1.8 * half


@pytest.mark.parametrize("share", [0.05, 1e-9])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mesh.ici.fsdp": 1},
        {"mesh.ici.fsdp": 8},
        {"pipeline.fsdp_gather": "once"},
        {"pipeline.fsdp_prefetch": "false"},
        {"pipeline.fsdp_prefetch": "true", "mesh.ici.fsdp": 8},
        {"pipeline.scan_layers_per_stage": True, "model.num_layers": 4},
    ],
)
def test_what_is_decided_without_devices_is_what_is_decided_on_them(share, values, monkeypatch):
    monkeypatch.setattr(prefetch, "MEMORY_SHARE", share)
    values = {"pipeline.num_layers_per_stage": 2, "model.num_layers": 4} | values
    ring = values.get("mesh.ici.fsdp", 4)
    memory = device_memory([V5P])
    assert prefetch.gathers_ahead_in(config_of(**values), memory) is decided(ring=ring, **values)[0]


def test_nothing_is_gathered_ahead_on_auto_in_an_unknown_memory():
    assert not prefetch.gathers_ahead_in(config_of(), None)
    assert prefetch.gathers_ahead_in(config_of(**{"pipeline.fsdp_prefetch": "true"}), None)
