"""A run that a device cannot hold ends with sizes and remedies."""

import re

import jax
import pytest
from helpers.commands import exit_code
from helpers.runs import write_config

from maxpipe.config import Config, replace, resolve
from maxpipe.devices.mesh import build_mesh
from maxpipe.supervise.failure import MemoryTooSmall
from maxpipe.train import main
from maxpipe.training import start
from maxpipe.training.start import explaining_memory

# As written by XLA for CPUs, GPUs (three times) and TPUs (compiling, allocating, loading).
MESSAGES = {
    "Out of memory allocating 115628717136 bytes.": "108 GiB asked for at once, the host has",
    "Out of memory while trying to allocate 4770354232 bytes.": "4.44 GiB asked for at once",
    "Failed to allocate request for 6.27GiB (6727663616B) on device": "6.27 GiB asked for at once",
    "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 63.80G of 30.75G "
    "hbm. Exceeded hbm capacity by 33.05G.": "the program needs 63.8 GiB of 30.8 GiB",
    "Error allocating device buffer: Attempting to allocate 129.50M. That was not possible. There "
    "are 78.17M free.; (0x0x0_HBM0)": "130 MiB asked for at once, 78.2 MiB free",
    "Error loading program: Attempting to reserve 10.51G at the bottom of memory. That was not "
    "possible. There are 8.97G free, 0B reserved": "10.5 GiB asked for at once, 8.97 GiB free",
}


@pytest.mark.parametrize("schedule", ["lockstep_1f1b", "1f1b"])
def test_lack_of_memory_is_told_with_sizes_and_what_helps(schedule):
    keys = {"mesh.ici.stage": 2, "mesh.ici.fsdp": 4, "pipeline.schedule": schedule}
    written = replace(Config(), **keys)
    config = resolve(written, 8)
    mesh = build_mesh(config)
    for message, sizes in MESSAGES.items():
        with pytest.raises(MemoryTooSmall) as told, explaining_memory(written, config, mesh):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
        first, remedies = str(told.value).split("\n")
        assert sizes in first
        assert re.search(r"pipeline.num_microbatches=\d+ saves [\d.]+ [KMG]iB;", remedies)


def test_other_errors_stay_what_they_are():
    for error in [jax.errors.JaxRuntimeError("INTERNAL: a"), MemoryError()]:
        config = resolve(replace(Config(), **{"mesh.ici.stage": 2, "mesh.ici.fsdp": 4}), 8)
        with pytest.raises(type(error)), explaining_memory(config, config, build_mesh(config)):
            raise error


def test_train_without_memory_ends_with_1_and_no_traceback(tmp_path, monkeypatch, capsys):
    def fail(run):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(start, "train", fail)
    words = [*write_config(tmp_path), "mesh.simulated_devices=8", "mesh.ici.fsdp=4"]
    assert exit_code(main, words) == 1
    said = capsys.readouterr().err
    assert "error: out of memory: 9 B asked for" in said
    assert "Traceback" not in said
