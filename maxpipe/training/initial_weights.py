"""Open the weights that a new run starts from, `init_from`: of a model, or of another run."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from maxpipe.checkpoint.arrays import differences, named_leaves, nbytes
from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.reader import ParameterReader
from maxpipe.checkpoint.record import PARAMS, record_file
from maxpipe.checkpoint.run_argument import open_steps
from maxpipe.config.catalog import WEIGHT_FORMATS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import implementation
from maxpipe.config.model_places import MAXTEXT, RUN, run_of, split_scheme
from maxpipe.config.sections import Config
from maxpipe.data.loader import check_base_tokenizer
from maxpipe.devices import processes
from maxpipe.devices.agreement import agree_on
from maxpipe.model.parameters import Params, has_frozen, trainable
from maxpipe.model.program import ModelProgram
from maxpipe.storage.local_files import sampled_digest
from maxpipe.telemetry.console import ByteProgress, format_bytes
from maxpipe.training.state import initial_params
from maxpipe.training.trainer import ReadParameter

KEY = "init_from"


class InitialWeights(Protocol):
    """Weights that fit the model: opening them has compared all names and shapes."""

    num_bytes: int
    num_elements: int

    def describe(self) -> list[str]: ...

    def read(
        self,
        path: tuple[str, ...],
        like: jax.ShapeDtypeStruct,
        advance: Callable[[float], None] = ...,
    ) -> jax.Array:
        """Return a parameter in its layout on disk, [num_layers, ...] for a layer parameter.

        Args:
          advance: called repeatedly with the share of the parameter that has been read so far.
        """
        ...


def open_weights(config: Config) -> InitialWeights | None:
    """Return the weights that `init_from` names; all processes call this.

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
    weights: InitialWeights = implementation(WEIGHT_FORMATS[form])(config)
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


class RunWeights:
    """The parameters of a run's newest step, checked against the model.

    The step may have been made with any mesh, schedule and engine. Its optimizer state is not read.
    All processes read the step that process 0 finds, since a run still in training may commit a
    newer one meanwhile, and check that it is the same.

    Raises:
      ConfigError: there is no step, it cannot be read, it has adapters, its model differs (all
        names are listed), or processes see different steps.
    """

    def __init__(self, config: Config):
        self._directory = newest_step(config.init_from)
        try:
            self._reader = ParameterReader([self._directory])
        except (CheckpointDamaged, CheckpointUnreadable) as error:
            raise ConfigError(Problem(KEY, str(error))) from error
        if self._reader.record.meta.get("config", {}).get("model", {}).get("lora", {}).get("rank"):
            message = (
                f"{config.init_from} has adapters (model.lora); python -m maxpipe.export "
                f"{run_of(config.init_from)} --hf NEW merges them, and hf:NEW names the result"
            )
            raise ConfigError(Problem(KEY, message))
        if processes.count() > 1:
            file = record_file(self._directory)
            agree_on({KEY: sampled_digest(str(file), file.stat().st_size)})
        specs, layers = ModelProgram(config.model).specs, np.arange(config.model.stacked_layers)
        params = jax.eval_shape(lambda key: initial_params(specs, key, layers), jax.random.key(0))
        leaves = self._reader.leaves
        if lines := differences(leaves, named_leaves({PARAMS: params}), any_float=True):
            raise ConfigError(*(Problem(KEY, f"{self._directory}: {line}") for line in lines))
        self.num_bytes = sum(nbytes(leaf) for leaf in leaves.values())
        self.num_elements = sum(math.prod(leaf.shape) for leaf in leaves.values())

    def describe(self) -> list[str]:
        size = f"{format_bytes(self.num_bytes)} in {len(self._reader.leaves)} arrays"
        return [f"{KEY}   {self._directory}: {size}, the optimizer starts at zero"]

    def read(
        self,
        path: tuple[str, ...],
        like: jax.ShapeDtypeStruct,
        advance: Callable[[float], None] = lambda share: None,
    ) -> jax.Array:
        try:
            array = self._reader.read(".".join((PARAMS, *path)), like.sharding)
        except (CheckpointDamaged, CheckpointUnreadable) as error:
            raise ConfigError(Problem(KEY, str(error))) from error
        advance(1.0)
        assert isinstance(array, jax.Array)
        return array.astype(like.dtype)


def newest_step(value: str) -> Path:
    """Return the directory of the newest committed step that process 0 finds in `run:DIR`."""
    store = open_steps(run_of(value), KEY)
    step = processes.of_first_process(max(store.steps(), default=0))
    if not step:
        raise ConfigError(Problem(KEY, f"{store} holds no checkpoint"))
    with store.local_copy(step) as directory:
        return directory  # on this machine, since `run:` takes no URL
