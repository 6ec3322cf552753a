"""Open the weights that a new run starts from, `init_from`, and report how far they are read."""

import math
import time
from collections.abc import Callable
from typing import Protocol

import jax

from maxpipe.config.catalog import WEIGHT_FORMATS
from maxpipe.config.imports import implementation
from maxpipe.config.model_places import maxtext_directory
from maxpipe.config.sections import Config
from maxpipe.training.trainer import ReadParameter

SECONDS_OF_PROGRESS = 5.0  # between two lines about weights that are read


class InitialWeights(Protocol):
    """Weights that fit the model: opening them has compared all names and shapes.

    Attributes:
      num_bytes, num_elements: of all tensors that are read.
    """

    num_bytes: int
    num_elements: int

    def describe(self) -> list[str]:
        """Return lines about what is read and what is left out."""
        ...

    def read(self, path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Return a parameter in the layout on disk, [num_layers, ...] if it is of layers.

        Args:
          path: of the parameter.
          like: shape, dtype and sharding of the result.
        """
        ...


def open_weights(config: Config) -> InitialWeights | None:
    """Return what `init_from` names, None if it is empty.

    Raises:
      ConfigError: it does not fit the model, with all names.
    """
    if not config.init_from:
        return None
    form = "maxtext" if maxtext_directory(config.init_from) else "hf"
    weights: InitialWeights = implementation(WEIGHT_FORMATS[form])(config)
    return weights


def with_progress(weights: InitialWeights, print_line: Callable[[str], None]) -> ReadParameter:
    """Wrap `weights.read` to print every few seconds how much of all bytes has been read."""
    num_elements = 0
    next_line = time.monotonic() + SECONDS_OF_PROGRESS

    def read(path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal num_elements, next_line
        value = weights.read(path, like)
        num_elements += math.prod(like.shape)
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + SECONDS_OF_PROGRESS
            gigabytes = weights.num_bytes / 1e9
            done = gigabytes * num_elements / weights.num_elements
            print_line(f"init_from   {done:.2f} of {gigabytes:.2f} GB are read")
        return value

    return read
