"""When weights are gathered a slot ahead on auto, and what is said about it."""

import pytest
from helpers.fsdp_stages import V5P, Device, config_of

from maxpipe.devices.chips import device_memory, memory_of_tpus
from maxpipe.pipeline.manual import MANUAL_AXES
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.planning import prefetch
from maxpipe.planning.footprint import device_parameters


def decided(device=V5P, **values):
    """Return (decision, notes)."""
    notes = []
    memory = memory_of_tpus([device])
    return prefetch.gathers_ahead(config_of(**values), memory, notes.append), notes


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
    does, (note,) = decided(**{"mesh.ici.fsdp": 8})
    assert not does
    assert "each of 8 devices of mesh axis fsdp" in note


@pytest.mark.parametrize(
    "values",
    [
        {"device": Device("cpu", "cpu")},
        {"device": Device("TPU v99")},
        {"mesh.ici.fsdp": 1},
        {"pipeline.fsdp_gather": "once"},
        {"pipeline.scan_layers_per_stage": True},
        {
            "pipeline.engine": "circular",
            "pipeline.schedule": "circular",
            "pipeline.num_microbatches": 4,
        },
        {"pipeline.fsdp_prefetch": "false"},
    ],
    ids=[
        "cpu",
        "unknown_tpu",
        "whole_weights",
        "gathered_once",
        "loop_over_layers",
        "circular",
        "false",
    ],
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


@pytest.mark.parametrize(("schedule", "chunks"), [("lockstep_1f1b", 2), ("lockstep_zb", 3)])
def test_units_that_run_in_one_tick_have_a_chunk_each(schedule, chunks, monkeypatch):
    values = {"pipeline.schedule": schedule, "pipeline.remat_policy": "minimal"}
    assert f"{chunks} gathered chunks take" in decided(**values)[1][0]
    chunk = device_parameters(config_of(**values), "layers", whole_over=MANUAL_AXES) * 4
    layers = config_of(**values).pipeline.num_layers_per_stage
    for share, decision in ((1.01, True), (0.99, False)):
        need = share * chunks * layers * chunk / device_memory([V5P])
        monkeypatch.setattr(prefetch, "MEMORY_SHARE", need)
        assert decided(**values)[0] is decision


def test_a_tpu_of_unknown_memory_is_said_where_a_decision_is_open():
    def noted(kind="TPU v99", platform="tpu", **values):
        notes = []
        config = config_of(**values)
        assert prefetch.memory_for_gathers(config, [Device(kind, platform)], notes.append) is None
        return notes

    told = {"pipeline.fsdp_gather": "once", "pipeline.fsdp_prefetch": "false"}
    (note,) = noted()
    assert note.endswith("the memory of TPU v99 is not known")
    assert noted(**told) == noted("cpu", "cpu") == noted(**{"mesh.ici.fsdp": 1}) == []
    circular = {"pipeline.engine": "circular", "pipeline.schedule": "circular"}
    whole = {"mesh.ici.fsdp": 1, "mesh.ici.data": 2, "pipeline.num_microbatches": 4}
    assert noted(**circular, **whole) == [note]


def test_a_table_from_a_file_tells_whether_backwards_are_split(tmp_path):
    minimal = {"pipeline.remat_policy": "minimal"}
    for schedule, splits in (("lockstep_1f1b", False), ("lockstep_zb", True)):
        path = tmp_path / "own.csv"
        path.write_text(
            to_csv(build_table(config_of(**{"pipeline.schedule": schedule, **minimal})))
        )
        config = config_of(**{"pipeline.schedule": str(path), **minimal})
        assert prefetch.splits_backward(config) is splits
