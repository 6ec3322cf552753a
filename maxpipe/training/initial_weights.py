"""Open the weights that a new run starts from, `init_from`, and report how far they are read."""

import math
from collections.abc import Callable
from typing import Protocol

import jax

from maxpipe.config.catalog import WEIGHT_FORMATS
from maxpipe.config.imports import implementation
from maxpipe.config.model_places import MAXTEXT, RUN, split_scheme
from maxpipe.config.sections import Config
from maxpipe.telemetry.byte_progress import ByteProgress
from maxpipe.training.trainer import ReadParameter


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

    def read(
        self,
        path: tuple[str, ...],
        like: jax.ShapeDtypeStruct,
        advance: Callable[[float], None] = ...,
    ) -> jax.Array:
        """Return a parameter in the layout on disk, [num_layers, ...] if it is of layers.

        Args:
          path: of the parameter.
          like: shape, dtype and sharding of the result.
          advance: is called with the share of the parameter that has been read, as it grows.
        """
        ...


def open_weights(config: Config, *, together: bool = False) -> InitialWeights | None:
    """Return what `init_from` names, None if it is empty.

    Args:
      config: resolved.
      together: whether all processes of the run call this, and may wait for each other.

    Raises:
      ConfigError: it does not fit the model, with all names.
    """
    if not config.init_from:
        return None
    schemes = {MAXTEXT: "maxtext", RUN: "run"}
    form = schemes.get(split_scheme(config.init_from)[0], "hf")
    build = implementation(WEIGHT_FORMATS[form])
    # Only a run may change while it is read.
    weights: InitialWeights = build(config, together=together) if form == "run" else build(config)
    return weights


def with_progress(weights: InitialWeights, progress: ByteProgress) -> ReadParameter:
    """Wrap `weights.read` to show how much of all bytes has been read."""
    num_finished = 0  # elements of whole parameters

    def read(path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal num_finished
        before, size = num_finished, math.prod(like.shape)

        def advance(share: float) -> None:
            # A padded vocabulary has more elements than the files.
            done = min(1.0, (before + share * size) / weights.num_elements)
            progress.show(round(done * weights.num_bytes))

        value = weights.read(path, like, advance)
        num_finished += size
        advance(1.0)
        return value

    return read
