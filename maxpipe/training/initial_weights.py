"""Open the weights that a new run starts from, `init_from`, and show the progress of reading."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any, Protocol

import jax
import numpy as np

from maxpipe.config.catalog import WEIGHT_FORMATS
from maxpipe.config.imports import implementation
from maxpipe.config.model_places import MAXTEXT, RUN, split_scheme
from maxpipe.config.sections import Config
from maxpipe.data.loader import check_base_tokenizer
from maxpipe.model.parameters import Params, has_frozen, trainable
from maxpipe.model.program import ModelProgram
from maxpipe.telemetry.byte_progress import ByteProgress
from maxpipe.training.state import initial_params
from maxpipe.training.trainer import ReadParameter


class InitialWeights(Protocol):
    """Weights that fit the model: opening them has compared all names and shapes.

    Attributes:
      num_bytes, num_elements: bytes and elements of all tensors that are read.
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
        """Return a parameter in its layout on disk, [num_layers, ...] for a layer parameter.

        Args:
          path: keys that lead to the parameter.
          like: shape, dtype and sharding of the result.
          advance: called repeatedly with the share of the parameter that has been read so far.
        """
        ...


def open_weights(config: Config, *, together: bool = False) -> InitialWeights | None:
    """Return the weights that `init_from` names, None if it is empty.

    Args:
      config: the resolved configuration.
      together: whether all processes of the run call this, and may wait for each other.

    Raises:
      ConfigError: the weights do not fit the model, all names are listed; or the tokenizer is
        another than theirs.
    """
    if not config.init_from:
        return None
    check_base_tokenizer(config)
    # The weights are for the base; a new run has new adapters, see `with_adapters`.
    config = replace(config, model=config.model.base)
    schemes = {MAXTEXT: "maxtext", RUN: "run"}
    form = schemes.get(split_scheme(config.init_from)[0], "hf")
    build = implementation(WEIGHT_FORMATS[form])
    # Only a run may change while it is read.
    weights: InitialWeights = build(config, together=together) if form == "run" else build(config)
    return weights


def with_adapters(config: Config, read: ReadParameter) -> ReadParameter:
    """Wrap `read`, which knows parameters of the base, to return new adapters as well.

    Their values are the same as in a run from random weights with the same seed.
    """
    specs = ModelProgram(config.model).specs
    if not has_frozen(specs):
        return read
    adapters = trainable(specs, specs)

    def leaf(tree: Params, path: tuple[str, ...]) -> Any:
        return reduce(getitem, path, tree)

    def read_any(path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf(specs, path).frozen:
            return read(path, like)

        def draw(key: jax.Array) -> jax.Array:
            params = initial_params(adapters, key, np.arange(config.model.stacked_layers))
            value: jax.Array = leaf(params, path)
            return value

        drawn: jax.Array = jax.jit(draw, out_shardings=like.sharding)(jax.random.key(config.seed))
        return drawn

    return read_any


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
