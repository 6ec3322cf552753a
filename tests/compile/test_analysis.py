"""What a compiled step is compared with, and what is read of its account of memory."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_trainer
from maxpipe.compile import analysis, report
from maxpipe.compile.analysis import analyse, branch_runs
from maxpipe.compile.step import OutOfMemory, memory_of, out_of_memory

MICROBATCHES = 4
TICKS = 9


def test_branch_runs_of_ticks_counts_microbatches_where_idle_slots_are_computed():
    lockstep = {"pipeline.engine": "scheduled", "pipeline.schedule": "lockstep_1f1b"}
    lockstep |= {"pipeline.num_microbatches": MICROBATCHES, "mesh.ici.stage": 2}
    lockstep["pipeline.num_repeats"] = 1
    for values, runs in (
        ({"pipeline.skip_idle": "false"}, MICROBATCHES),
        ({"pipeline.skip_idle": "true"}, TICKS),
        ({}, TICKS),  # auto skips idle slots on simulated devices ...
        ({"mesh.ici.tensor": 2}, MICROBATCHES),  # ... unless the partitioner splits their work
        ({"pipeline.schedule": "circular", "pipeline.engine": "circular"}, TICKS),
    ):
        config = tiny(**lockstep | values)
        assert branch_runs(config, make_mesh(config))(TICKS) == runs, values


def test_a_step_that_the_compiler_gives_up_is_compared_with_the_memory_in_the_table(monkeypatch):
    def give_up(*_):
        raise OutOfMemory(needed=3e9, available=2e9)

    config = tiny(**{"pipeline.engine": "sequential", "mesh.simulated_devices": 1})
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)

    def capacity(in_table):
        monkeypatch.setattr(report, "device_memory", lambda devices: in_table)
        compiled, _ = analyse(config, config, mesh, trainer, note=print)
        return compiled.capacity, compiled.fits

    assert capacity(1e9) == (1e9, True)
    monkeypatch.setattr(analysis, "compile_step", give_up)
    assert capacity(1e9) == (1e9, False)
    assert capacity(None) == (2e9, False)


# Figures in MiB of a loop that fills a store, which libtpu 0.0.42.1 compiled for v5e:2x4.
LOOP = {"argument": 416, "output": 416, "alias": 0, "temp": 19968, "generated_code": 1}


def memory(platform, peak, **changes):
    sizes = LOOP | changes
    stats = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    compiled = SimpleNamespace(
        memory_analysis=lambda: SimpleNamespace(**stats, peak_memory_in_bytes=peak)
    )
    mesh = SimpleNamespace(devices=np.array([[SimpleNamespace(platform=platform)]]))
    found = memory_of(compiled, mesh)
    return found.temp, found.total


def test_temp_memory_is_what_lives_at_once():
    assert memory("tpu", 15808) == (14976, 15809)  # fits a chip of 15.75 GiB, as libtpu says
    assert memory("tpu", 15392, alias=416) == (14976, 15393)  # results in the arguments' memory
    assert memory("tpu", 1088, temp=100) == (100, 933)
    assert memory("tpu", 0) == (19968, 20801)  # an older libtpu gives no peak
    assert memory("cpu", 832) == (19968, 20801)  # its peak has no temp memory at all


def test_sizes_are_read_off_a_compiler_that_gave_up():
    for message, expected in {
        "Used 120.5G of 95.7G hbm": (120.5, 95.7),
        "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (16.03G) exceeds available HBM (15.75G). HLO module: jit_step.": (
            16.03,
            15.75,
        ),
    }.items():
        found = out_of_memory(message)
        assert found is not None
        assert (found.needed / 2**30, found.available / 2**30) == pytest.approx(expected)
    assert out_of_memory("INTERNAL: Mosaic failed to compile TPU kernel") is None
