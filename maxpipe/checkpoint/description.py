"""Describe the arrays of a state for its record, and refuse a state that is not finite."""

from collections.abc import Mapping

import numpy as np

from maxpipe.checkpoint.arrays import Array
from maxpipe.checkpoint.digest import Summary, summaries
from maxpipe.checkpoint.errors import StateNotFinite
from maxpipe.checkpoint.reader import PARAMS
from maxpipe.checkpoint.record import Leaf


def check_finite(step: int, arrays: Mapping[str, Array]) -> dict[str, Summary]:
    """Return the summaries of a state's arrays; raise if the state is not finite.

    Args:
      step: number of finished training steps.
      arrays: the state's arrays by dotted path.

    Raises:
      StateNotFinite: a number is not finite, or a parameter is so large that its square is not.
    """
    summary_of = summaries(arrays)
    names = [
        name
        for name, summary in summary_of.items()
        if not (summary.has_finite_squares if PARAMS in name.split(".") else summary.is_finite)
    ]
    if names:
        raise StateNotFinite(step, names)
    return summary_of


def describe(step: int, arrays: dict[str, Array]) -> dict[str, Leaf]:
    """Return shape, dtype and digest of every array; raises as `check_finite`."""
    summary_of = check_finite(step, arrays)
    return {
        name: Leaf(tuple(array.shape), np.dtype(array.dtype).name, summary_of[name].digest)
        for name, array in arrays.items()
    }
