"""Meshes are fitted to the devices; the meshes that errors propose are legal."""

import re

LARGE = ("model.num_layers=24", "data.global_batch_size=192")


def test_unknown_axis_takes_the_devices_left(resolved):
    table = {  # (words, devices): stage, fsdp and data
        ("", 4): (2, 2, 1),
        ("mesh.ici.fsdp=-1", 8): (2, 4, 1),
        ("mesh.ici.stage=-1", 8): (4, 2, 1),
        ("mesh.ici.data=-1", 4): (2, 2, 1),
    }
    meshes = {(w, n): resolved(*w.split(), devices=n).mesh.ici for w, n in table}
    assert {case: (m.stage, m.fsdp, m.data) for case, m in meshes.items()} == table


def test_unknown_dcn_axis_takes_the_slices(resolved):
    config = resolved("mesh.dcn.data=-1", devices=8, slices=2)
    assert (config.mesh.dcn.data, config.mesh.ici.stage, config.mesh.ici.fsdp) == (2, 2, 2)
    assert resolved("mesh.dcn.data=-1").mesh.dcn.data == 1


def test_mesh_that_does_not_fit_gives_both_numbers(problems):
    table = {  # (words, devices, slices): key and numbers
        ("", 8, 1): ("mesh.ici", "stage=2 x fsdp=2 makes 4, but there are 8 devices;"),
        ("", 1, 1): ("mesh.ici", "makes 4, but there is 1 device;"),
        ("mesh.ici.stage=4 mesh.ici.fsdp=-1", 6, 1): ("mesh.ici", "not divide the 6 devices;"),
        ("", 8, 2): ("mesh.dcn", "all axes 1 makes 1, but there are 2 slices;"),
        ("mesh.dcn.data=2", 4, 1): ("mesh.dcn", "data=2 makes 2, but there is 1 slice;"),
        ("mesh.dcn.data=2", 16, 2): ("mesh.ici", "4, but there are 8 devices per slice;"),
    }
    refusals = {(w, n, s): problems(*w.split(), devices=n, slices=s) for w, n, s in table}
    unlike = {
        case: refusals[case]
        for case, (key, numbers) in table.items()
        if list(refusals[case]) != [key] or numbers not in refusals[case][key]
    }
    assert unlike == {}


def test_proposed_meshes_fit(problems):
    table = {  # words: devices and slices
        "": ((8, 1), (2, 1), (64, 1), (1, 1), (8, 2), (16, 4)),
        "mesh.ici.tensor=4": ((8, 1),),
        "mesh.ici.fsdp=-1 mesh.ici.stage=3": ((8, 1),),
        "data.global_batch_size=24": ((12, 1),),
    }
    for text, devices, slices in ((words, *count) for words in table for count in table[words]):
        words = (*text.split(), *LARGE)
        refusals = problems(*words, devices=devices, slices=slices)
        fitting = refusals[next(iter(refusals))].partition("these fit: ")[2]
        proposals = re.sub(r"\(.*\)", "", fitting).split(";")
        assert len(proposals) == 3 or (proposals and devices < 3)
        for proposal in proposals:
            assert problems(*words, *proposal.split(), devices=devices, slices=slices) == {}


def test_mismatch_names_the_simulated_devices_that_would_do(problems):
    table = {  # (words, devices): devices that are needed
        ("", 1): 4,
        ("mesh.ici.fsdp=-1", 1): 2,
        ("mesh.simulated_devices=3 mesh.ici.fsdp=-1", 3): 4,
        ("mesh.simulated_devices=8 mesh.ici.stage=3", 8): 6,
    }
    for (words, devices), needed in table.items():
        message = problems(*words.split(), *LARGE, devices=devices)["mesh.ici"]
        assert f"mesh.simulated_devices={needed} makes a CPU" in message, words
        fitting = (*words.split(), *LARGE, f"mesh.simulated_devices={needed}")
        assert problems(*fitting, devices=needed) == {}, words
    assert "simulated_devices" not in problems(*LARGE, devices=8)["mesh.ici"]


def test_proposed_meshes_start_with_the_nearest_and_keep_other_axes(problems):
    message = problems(devices=8)["mesh.ici"]
    nearest = "mesh.ici.stage=2 mesh.ici.fsdp=4; mesh.ici.data=2 mesh.ici.stage=2 mesh.ici.fsdp=2"
    assert f"these fit: {nearest}" in message
    message = problems("mesh.ici.context=2", "mesh.ici.fsdp=4", devices=8)["mesh.ici"]
    proposals = message.partition("these fit: ")[2].split(";")
    assert ["mesh.ici.context=2" in proposal for proposal in proposals] == [True] * 3
    message = problems("mesh.ici.fsdp=4")["mesh.ici"]
    assert "these fit: mesh.ici.stage=1 mesh.ici.fsdp=4;" in message  # as on the command line


def test_problem_that_no_mesh_solves_is_said_as_well_and_does_not_choose_the_meshes(problems):
    words = "pipeline.schedule=zb_h1 pipeline.num_repeats=2 mesh.ici.stage=4"
    refusals = problems(*words.split(), "mesh.simulated_devices=4")
    assert "these fit: mesh.ici.stage=4 mesh.ici.fsdp=1;" in refusals["mesh.ici"]
    assert "must be 1 with schedule zb_h1, got 2" in refusals["pipeline.num_repeats"]


def test_two_unknown_axes_are_refused(problems):
    refusals = problems("mesh.ici.stage=-1", "mesh.ici.fsdp=-1")
    assert refusals == {
        "mesh.ici.fsdp": "only one axis may be -1, not mesh.ici.stage and mesh.ici.fsdp"
    }
