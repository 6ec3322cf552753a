"""Numbers of closed forms: each may be an array with an entry for each of many candidates."""

from typing import TypeAlias

import numpy as np

Number: TypeAlias = float | np.ndarray
FLOAT32 = 4.0  # bytes


def single(number: Number) -> float:
    """Return the number of the only candidate, or the first one's."""
    return float(np.ravel(number)[0])
