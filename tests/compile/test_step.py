"""What is read of a compiler's own account of memory: stand-ins for compiled programs."""

from types import SimpleNamespace

import numpy as np
import pytest

from maxpipe.compile.step import memory_of, out_of_memory

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
