"""Devices of TPU slices that need not be there."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.compile_command import tpu_aot

from maxpipe.compile.topology import neighbour_bandwidth


def test_neighbouring_stages_are_as_fast_as_the_slowest_network_between_them():
    for slices, bandwidth in (
        ([[0, 0], [0, 0]], 45e9),
        ([[0, 1], [0, 1]], 45e9),  # each device sends to one of its own slice
        ([[0, 0], [0, 0], [1, 1]], 3e9),
    ):
        meshes = [
            SimpleNamespace(devices=np.array([SimpleNamespace(slice_index=i) for i in of_stage]))
            for of_stage in slices
        ]
        assert neighbour_bandwidth(meshes, 45e9, 3e9) == bandwidth


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize("topology", ["v5e:1x1", "v6e-1"])
    def test_devices_of_the_smallest_slice_are_one_chip(self, topology):
        """In a process of its own, whose JAX is not in use yet."""
        code = (
            "from maxpipe.compile.topology import devices_of\n"
            "from maxpipe.config import Config, replace\n"
            f"config = replace(Config(), **{{'compile.topology': {topology!r}}})\n"
            "print([d.device_kind for d in devices_of(config)])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        kind = {"v5e:1x1": "TPU v5 lite", "v6e-1": "TPU v6 lite"}[topology]
        assert done.stdout == f"{[kind]}\n", done.stderr
