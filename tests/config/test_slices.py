"""Names of TPU slices: libtpu's and the cloud's."""

import re

import pytest

from maxpipe.config.slices import (
    canonical_topology,
    explain_topology,
    hosts_of,
    names_kind,
    num_devices,
    slices_of,
)


def test_canonical_topology_is_the_name_that_libtpu_knows():
    table = {
        "v5p:4x4x4": ("v5p:4x4x4", 64),
        "v5p-128": ("v5p:4x4x4", 64),
        "v5p-8": ("v5p:2x2x1", 4),
        "v5p-512": ("v5p:4x8x8", 256),
        "v5p-1536": ("v5p:8x8x12", 768),
        "v5litepod-256": ("v5e:16x16", 256),
        "v6e-8": ("v6e:2x4", 8),
        "v6e-1": ("v6e:1x1", 1),
        "v5litepod-1": ("v5e:1x1", 1),
        "v7x:2x2x1": ("tpu7x:2x2x1", 8),
        "ironwood-128": ("tpu7x:4x4x4", 128),
        "v3:4x4": ("v3:4x4", 16),
    }
    names = {name: canonical_topology(name) for name in table}
    assert {name: (ours, num_devices(ours)) for name, ours in names.items()} == table


def test_a_slice_that_does_not_exist_is_answered_with_the_nearest():
    table = {
        "v5p-100": ["100 TensorCores", "v5p-64 (v5p:2x4x4)", "v5p-128 (v5p:4x4x4)"],
        "v5p-7": ["7 TensorCores", "v5p-8 (v5p:2x2x1)"],
        "v6e-512": ["512 chips", "v6e-256 (v6e:16x16)"],
        "tpu": ["neither cpu nor a chip and its grid", "v5p-128"],
        "H100:8": ["'H100:8' is neither", "maxpipe.plan takes GPUs"],
        "v5e": ["'v5e' is neither", "v5e:4x4"],
    }
    for name, words in table.items():
        with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
            canonical_topology(name)
        assert [word for word in words if word not in str(caught.value)] == [], name


def test_hosts_of_a_slice_of_several_have_four_chips_each():
    hosts = {"v5e:2x4": 1, "v5e:4x4": 4, "v6e:16x16": 64, "v5p:2x2x1": 1, "v5p:4x4x4": 16}
    assert {topology: hosts_of(topology) for topology in hosts} == hosts


def test_explain_topology_says_what_a_name_was_understood_as():
    lines = {
        "v5p-128": "compile.topology=v5p-128 is v5p:4x4x4, 64 chips",
        "v6e-1": "compile.topology=v6e-1 is v6e:1x1, 1 chip",
        "V3:2x2": "compile.topology=V3:2x2 is v3:2x2, 4 chips",
        **dict.fromkeys(("", "cpu", "v5p:4x4x4"), ""),
    }
    assert {name: explain_topology(name) for name in lines} == lines


def test_slices_of_a_kind_and_names_of_kinds():
    assert slices_of("v6e")[:2] == ["v6e:1x1", "v6e:2x2"]
    assert slices_of("v5p")[0] == "v5p:2x2x1"
    names = ["v5e", "V5P-128", "ironwood:2x2x1", "v3:2x2", "H100:8", "v9-8", ""]
    assert [name for name in names if names_kind(name)] == names[:4]
