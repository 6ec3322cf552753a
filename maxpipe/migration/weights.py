"""Read the weights of a MaxText checkpoint into parameters, shard by shard.

A process reads what its own shards need, so a model need not fit on any host.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding

from maxpipe.checkpoint.arrays import box_of
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import maxtext_directory
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.migration.orbax_arrays import find_item, open_parameters
from maxpipe.migration.stored_model import Path as ParameterPath
from maxpipe.migration.stored_model import (
    StoredModel,
    divides_scores,
    model_problems,
    parameters,
    rotates_neighbours,
)
from maxpipe.telemetry.console import format_bytes

KEY = "init_from"


class MaxTextWeights:
    """The weights in the directory `init_from`, with names and shapes checked against the model.

    Raises:
      ConfigError: arrays are missing, unknown, of another shape, or damaged; names all of them.
    """

    def __init__(self, config: Config):
        model, directory = config.model, maxtext_directory(config.init_from)
        if problems := model_problems(model):
            raise ConfigError(*problems)
        try:
            item = find_item(Path(directory))
            arrays = open_parameters(item)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ConfigError(Problem(KEY, f"cannot read {directory}: {error}")) from None
        self._stored = StoredModel(arrays, parameters(model), model.num_layers, model.vocab_size)
        if self._stored.differences:
            lines = (f"{item}: {line}" for line in self._stored.differences)
            raise ConfigError(*(Problem(KEY, line) for line in lines))
        self.num_elements = self._stored.num_elements
        self.num_bytes = self._stored.num_bytes
        size = f"{format_bytes(self.num_bytes)} in {len(arrays)} arrays"
        self._lines = [f"{item}: {size}, the optimizer starts at zero", *_changes(model)]

    def describe(self) -> list[str]:
        """Return lines about what is read and how it is changed."""
        return [f"{KEY}   {line}" for line in self._lines]

    def read(
        self,
        path: ParameterPath,
        like: jax.ShapeDtypeStruct,
        advance: Callable[[float], None] = lambda share: None,
    ) -> jax.Array:
        """Return a parameter in the layout on disk, [num_layers, ...] for layers.

        Host memory holds one device's shard at a time, and the chunks of the file that contain it.
        `advance` is called after each shard with the share that has been read.

        Raises:
          ConfigError: a file is damaged, or numbers in it are not finite.
        """
        assert isinstance(like.sharding, Sharding)
        places = like.sharding.addressable_devices_indices_map(like.shape)
        boxes = {device: box_of(index, like.shape) for device, index in places.items()}
        shards: dict[jax.Device, jax.Array] = {}
        different = dict.fromkeys(boxes.values())
        for count, box in enumerate(different, start=1):
            try:
                values = self._stored.read(path, box).astype(like.dtype)
            except (ValueError, OSError) as error:
                message = f"cannot read {'.'.join(path)}: {error}"
                raise ConfigError(Problem(KEY, message)) from None
            if not np.isfinite(values).all():
                message = f"{'.'.join(path)} has NaN or infinity; take an intact copy"
                raise ConfigError(Problem(KEY, message))
            owners = [device for device, own_box in boxes.items() if own_box == box]
            shards |= {device: jax.device_put(values, device) for device in owners}
            jax.block_until_ready([shards[device] for device in owners])
            advance(count / len(different))
        in_order = [shards[device] for device in boxes]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, in_order)


def _changes(m: ModelConfig) -> list[str]:
    """Return a line for each way in which weights are changed, with its reason."""
    lines = []
    if not divides_scores(m):
        reason = "by which the blocks llama2 and mistral do not divide scores"
        lines.append(f"query weights are multiplied by the root of head_dim, {reason}")
    if rotates_neighbours(m) and not m.rope_interleaved:
        reason = "rope_type=llama3.1 rotates neighbours, model.rope_interleaved=false does not"
        lines.append(f"channels of queries and keys are reordered: {reason}")
    return lines
