"""Meshes are fitted to the devices; the meshes that errors propose are legal."""

import re

import pytest

from maxpipe.config import ConfigError, load, replace, resolve


@pytest.mark.parametrize(
    ("words", "devices", "axes"),
    [
        ((), 4, {"stage": 2, "fsdp": 2}),
        (("mesh.ici.fsdp=-1",), 8, {"stage": 2, "fsdp": 4}),
        (("mesh.ici.stage=-1",), 8, {"stage": 4, "fsdp": 2}),
        (("mesh.ici.data=-1",), 4, {"data": 1}),
    ],
)
def test_unknown_axis_takes_the_devices_left(resolved, words, devices, axes):
    config = resolved(*words, devices=devices)
    assert {axis: getattr(config.mesh.ici, axis) for axis in axes} == axes


def test_unknown_dcn_axis_takes_the_slices(resolved):
    config = resolved("mesh.dcn.data=-1", devices=8, slices=2)
    assert (config.mesh.dcn.data, config.mesh.ici.stage, config.mesh.ici.fsdp) == (2, 2, 2)
    assert resolved("mesh.dcn.data=-1").mesh.dcn.data == 1


@pytest.mark.parametrize(
    ("words", "devices", "slices", "key", "numbers"),
    [
        ((), 8, 1, "mesh.ici", "stage=2 x fsdp=2 makes 4, but there are 8 devices;"),
        ((), 1, 1, "mesh.ici", "makes 4, but there is 1 device;"),
        (
            ("mesh.ici.stage=4", "mesh.ici.fsdp=-1"),
            6,
            1,
            "mesh.ici",
            "makes 4, which does not divide the 6 devices;",
        ),
        ((), 8, 2, "mesh.dcn", "all axes 1 makes 1, but there are 2 slices;"),
        (("mesh.dcn.data=2",), 4, 1, "mesh.dcn", "data=2 makes 2, but there is 1 slice;"),
        (("mesh.dcn.data=2",), 16, 2, "mesh.ici", "makes 4, but there are 8 devices per slice;"),
    ],
)
def test_mesh_that_does_not_fit_gives_both_numbers(problems, words, devices, slices, key, numbers):
    refusals = problems(*words, devices=devices, slices=slices)
    assert list(refusals) == [key]
    assert numbers in refusals[key]


@pytest.mark.parametrize(
    ("words", "devices", "slices"),
    [
        ((), 8, 1),
        ((), 2, 1),
        ((), 16, 1),
        ((), 64, 1),
        ((), 1, 1),
        (("mesh.ici.tensor=4",), 8, 1),
        (("mesh.ici.fsdp=-1", "mesh.ici.stage=3"), 8, 1),
        (("data.global_batch_size=24",), 12, 1),
        ((), 8, 2),
        ((), 16, 4),
    ],
)
def test_proposed_meshes_fit(problems, words, devices, slices):
    words = (*words, "model.num_layers=24", "data.global_batch_size=192")
    refusals = problems(*words, devices=devices, slices=slices)
    proposals = re.sub(
        r"\(.*\)", "", refusals[next(iter(refusals))].partition("these fit: ")[2]
    ).split(";")
    assert 1 <= len(proposals) <= 3
    assert len(proposals) == 3 or devices < 3
    for proposal in proposals:
        assert problems(*words, *proposal.split(), devices=devices, slices=slices) == {}, proposal


@pytest.mark.parametrize(
    ("words", "devices", "needed"),
    [
        ((), 1, 4),
        (("mesh.ici.fsdp=-1",), 1, 2),
        (("mesh.simulated_devices=2",), 2, 4),
        (("mesh.simulated_devices=3", "mesh.ici.fsdp=-1"), 3, 4),
        (("mesh.simulated_devices=8", "mesh.ici.stage=3"), 8, 6),
        ((), 8, None),
    ],
)
def test_mismatch_names_the_simulated_devices_that_would_do(problems, words, devices, needed):
    words = (*words, "model.num_layers=24", "data.global_batch_size=192")
    message = problems(*words, devices=devices)["mesh.ici"]
    if needed is None:
        assert "simulated_devices" not in message
    else:
        assert f"mesh.simulated_devices={needed} makes a CPU" in message
        fitting = (*words, f"mesh.simulated_devices={needed}")
        assert problems(*fitting, devices=needed) == {}


def test_proposed_meshes_start_with_the_nearest(problems):
    message = problems(devices=8)["mesh.ici"]
    assert (
        "these fit: mesh.ici.stage=2 mesh.ici.fsdp=4; "
        "mesh.ici.data=2 mesh.ici.stage=2 mesh.ici.fsdp=2" in message
    )


def test_proposed_meshes_keep_other_axes(problems):
    message = problems("mesh.ici.context=2", "mesh.ici.fsdp=4", devices=8)["mesh.ici"]
    proposals = message.partition("these fit: ")[2].split(";")
    assert len(proposals) == 3
    assert all("mesh.ici.context=2" in proposal for proposal in proposals)


def test_two_unknown_axes_are_refused(problems):
    refusals = problems("mesh.ici.stage=-1", "mesh.ici.fsdp=-1")
    assert refusals == {"mesh.ici.fsdp": "only one axis may be -1, not stage and fsdp"}


def test_mesh_and_other_problems_are_raised_together(base):
    config = replace(load(base).config, **{"optimizer.warmup_steps": 200})
    with pytest.raises(ConfigError) as caught:
        resolve(config, 3)
    assert {problem.key for problem in caught.value.problems} == {
        "mesh.ici",
        "optimizer.warmup_steps",
    }
