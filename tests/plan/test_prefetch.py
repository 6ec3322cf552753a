"""When weights are gathered in steps on auto, and what is said about it."""

from helpers.fsdp_stages import V5P, Device, config_of

from maxpipe.devices.chips import tpu_of
from maxpipe.plan import choices


def decided(device=V5P, **values):
    """Return (decision, notes)."""
    notes = []
    return choices.gathers_in_steps(config_of(**values), tpu_of([device]), notes.append), notes


def test_prefetch_on_auto_is_on_with_short_rings_of_tpus_and_says_so():
    for kind, size in (("TPU v5p", 2), ("TPU v5p", 8), ("TPU v6 lite", 8), ("TPU v5 lite", 2)):
        does, (note,) = decided(Device(kind), **{"mesh.ici.fsdp": size})
        assert does, (kind, size)
        assert note.startswith("pipeline.fsdp_prefetch=true: "), (kind, size)


def test_prefetch_on_auto_avoids_rings_that_are_long_for_the_chip_and_says_so():
    for kind, size, longest in (("TPU v5p", 16, 8), ("TPU v6 lite", 16, 8), ("TPU v5 lite", 4, 2)):
        does, (note,) = decided(Device(kind), **{"mesh.ici.fsdp": size})
        assert not does, (kind, size)
        assert (
            f"mesh axis fsdp has {size} devices, and steps are chosen for up to {longest} " in note
        )


def test_prefetch_is_off_without_a_word_where_nothing_is_decided():
    for values in (
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
    ):
        values = {"model.num_layers": 4, "pipeline.num_layers_per_stage": 2} | values
        assert decided(**values) == (False, []), values
        assert decided(**{"pipeline.fsdp_prefetch": "true"}) == (True, []), values
