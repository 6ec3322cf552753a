"""Machines that topologies name, and those that are not priced."""

import pytest

from maxpipe.config import Config, replace
from maxpipe.plan.search.machine import MOST_SIMULATED, machine_of


def test_machines_without_a_price_are_refused_with_those_that_have_one():
    for topology, slices, words in (
        ("H100:8", 8, ["H100:8 is one machine", "compile.num_slices=8"]),
        ("cpu:8", 2, ["cpu:8 is one machine", "compile.num_slices=2"]),
        ("H100:9", 1, ["give 1 to 8 GPUs of one host"]),
        (f"cpu:{MOST_SIMULATED + 1}", 1, [f"1 to {MOST_SIMULATED} simulated devices"]),
        ("L4:8", 1, ["'L4:8'", "A100, H100, H200, B200", "v5p:4x4x4"]),
    ):
        with pytest.raises(ValueError, match=r"give|leave it out|did you mean") as caught:
            machine_of(topology, slices, Config())
        assert [word for word in words if word not in str(caught.value)] == [], (topology, slices)


def test_machine_of_gpus_and_simulated_devices_is_one_host():
    simulated = replace(Config(), **{"mesh.simulated_devices": 6})
    for topology, devices in (("h100:8", 8), ("cpu:4", 4), ("cpu", 6)):
        machine = machine_of(topology, 1, simulated)
        assert (machine.devices, machine.slices, machine.hosts) == (devices, 1, 1)
