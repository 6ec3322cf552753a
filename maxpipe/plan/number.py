"""Numbers of closed forms: each may be an array with an entry for each of many candidates."""

from typing import NamedTuple, TypeAlias

import numpy as np

Number: TypeAlias = float | np.ndarray
FLOAT32 = 4.0  # bytes


def single(number: Number) -> float:
    """Return the number of the only candidate, or the first one's."""
    return float(np.ravel(number)[0])


class Seconds(NamedTuple):
    """A predicted step, whose parts are means of all devices."""

    products: Number  # with attention, what runs between them, and the optimizer's update
    communication: Number  # what computation waits for
    bubble: Number  # idle slots and idle stages

    @property
    def step(self) -> Number:
        return self.products + self.communication + self.bubble
