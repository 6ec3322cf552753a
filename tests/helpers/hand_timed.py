"""A scheduled program whose times are worked out by hand, and its walk.

A cycle takes 1 ns, memory and links move a byte in 1 ns.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from maxpipe.compile.hlo import parse
from maxpipe.compile.prediction.constants import Constants
from maxpipe.compile.prediction.operations import Prices
from maxpipe.compile.prediction.origins import Origins
from maxpipe.compile.prediction.prediction import Basis
from maxpipe.compile.prediction.walk import Timeline, TimesTaken, every_time, walk
from maxpipe.devices.chips import chip_of

HLO = Path(__file__).parents[1] / "compile" / "prediction"
NANOSECOND = 1e-9
CONSTANTS = Constants("v5p", 1e9, 1e12, 0.5, 0.8, 1e9, 1e9, None)
BASIS = Basis("0.0", CONSTANTS)

# A loop of 3 ticks. In each, a permute of 100 bytes starts, 60 cycles of a matrix product run
# beneath it, and its end is awaited for the other 40 ns; a gather of 100 bytes from each of two
# devices sends 100 bytes and hides nothing; a conditional has a branch of 50 cycles and one of 2.
# Outside, a copy of 400 bytes starts before 90 cycles of a loop fusion and 300 cycles of another.
PROGRAM = (HLO / "step.hlo").read_text(encoding="utf-8")
TICK = 60 + 40 + 100  # without the conditional
OUTSIDE_LOOPS = 400 + 300


def mesh(num_slices: int = 1) -> SimpleNamespace:
    """Four devices, stage=2 x fsdp=2; stages in slices of their own if there are two."""
    grid = np.empty(4, object)
    grid[:] = [
        SimpleNamespace(coords=coords, slice_index=coords[0] * (num_slices - 1), platform="tpu")
        for coords in product(range(2), range(2), range(1))
    ]
    names = ("stage", "fsdp")
    return SimpleNamespace(devices=grid.reshape(2, 2), axis_names=names, size=4)


def walked(
    text: str = PROGRAM,
    times_taken: TimesTaken = every_time,
    num_slices: int = 1,
    constants: Constants = CONSTANTS,
) -> Timeline:
    module = parse(text)
    prices = Prices(module, mesh(num_slices), chip_of("v5p"), constants)  # type: ignore[arg-type]
    return walk(module, prices, Origins(text, module), times_taken)
