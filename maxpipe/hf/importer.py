"""Read the weights of a folder of Hugging Face into parameters, layer by layer and shard by shard.

A process reads the bytes of its own shards only, so a model need not fit on any host.
"""

import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from maxpipe.config.catalog import MODEL_TYPES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import folder_of, read_shape
from maxpipe.config.imports import implementation
from maxpipe.config.sections import Config
from maxpipe.hf.matching import differences, is_ignored, shape_problems, text_name
from maxpipe.hf.safetensors import SafetensorsError, copy_view, read_folder
from maxpipe.hf.tensor_table import Path as ParameterPath
from maxpipe.hf.tensors import Rule, tensor_names, tensor_rules
from maxpipe.model.program import ModelProgram

KEY = "init_from"


class HfWeights:
    """The weights of a folder, which have been compared with the model by names and shapes.

    Args:
      config: resolved; `init_from` names the folder.

    Attributes:
      ignored: names of tensors that play no part.
      num_bytes, num_elements: of all other tensors.

    Raises:
      ConfigError: something is missing, unknown, of another shape, or damaged; with all names.
    """

    def __init__(self, config: Config):
        directory = self._directory = folder_of(config.init_from)
        self._program = ModelProgram(config.model)
        shape = read_shape(directory, KEY)
        problems = shape_problems(config, shape, directory)
        if problems:
            raise ConfigError(*problems)
        family = implementation(MODEL_TYPES[shape.model_type])()
        self._rules = {rule.path: rule for rule in tensor_rules(family, self._program)}
        try:
            stored = {
                text_name(name): tensor for name, tensor in read_folder(Path(directory)).items()
            }
        except (SafetensorsError, OSError) as error:
            raise ConfigError(Problem(KEY, str(error))) from None
        self._num_layers = config.model.num_layers
        expected = tensor_names(list(self._rules.values()), self._num_layers)
        tied = config.model.tie_embeddings
        self.ignored = sorted(name for name in stored if is_ignored(name, self._num_layers, tied))
        self._tensors = {name: stored[name] for name in stored.keys() - {*self.ignored}}
        if found := [*differences(self._tensors, expected)]:
            raise ConfigError(*(Problem(KEY, f"{directory}: {line}") for line in found))
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())
        self.num_elements = sum(math.prod(tensor.shape) for tensor in self._tensors.values())
        self._largest = max(tensor.num_bytes for tensor in self._tensors.values())

    def describe(self) -> list[str]:
        """Return lines about what is read and what is left out."""
        size = f"{self.num_bytes / 1e9:.2f} GB in {len(self._tensors)} tensors"
        lines = [f"init_from   {self._directory}: {size}, the optimizer starts at zero"]
        if self.ignored:
            kinds = sorted({re.sub(r"\d+", "*", name) for name in self.ignored})
            lines.append(f"init_from   not part of the model: {', '.join(kinds)}")
        return lines

    def read(self, path: ParameterPath, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Return a parameter in the layout on disk, [num_layers, ...] if it is of layers.

        Args:
          path: of the parameter.
          like: shape, dtype and sharding of the result.
        """
        assert isinstance(like.sharding, Sharding)
        places = like.sharding.addressable_devices_indices_map(like.shape)
        shards = []
        for device, index in places.items():
            assert index is not None
            shards.append(self._read_shard(self._rules[path], index, like, device))
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)

    def _read_shard(
        self, rule: Rule, index: tuple[slice, ...], like: jax.ShapeDtypeStruct, device: jax.Device
    ) -> jax.Array:
        """Return a device's part; a large one is put together on the device, layer by layer."""
        shape = tuple(len(range(n)[i]) for n, i in zip(like.shape, index, strict=True))
        if not rule.is_layer:
            part = np.empty(shape, like.dtype)
            self._copy(rule, 0, index, part)
            return jax.device_put(part, device)
        layers = range(self._num_layers)[index[0]]
        if math.prod(shape) * like.dtype.itemsize <= self._largest:
            parts = np.empty(shape, like.dtype)
            for layer, part in zip(layers, parts, strict=True):
                self._copy(rule, layer, index[1:], part)
            return jax.device_put(parts, device)
        value = jnp.empty(shape, like.dtype, device=device)
        for place, layer in enumerate(layers):
            part = np.empty(shape[1:], like.dtype)
            self._copy(rule, layer, index[1:], part)
            value = _replace_layer(value, *jax.device_put((part, np.int32(place)), device))
            value.block_until_ready()  # so that the next part is read after this one is freed
        return value

    def _copy(self, rule: Rule, layer: int, index: tuple[slice, ...], target: np.ndarray) -> None:
        """Read `index` of one layer's parameter into an array."""
        if not rule.experts:
            tensor = self._tensors[rule.template.format(layer=layer)].read()
            copy_view(rule.to_parameter(tensor)[index], target)
            return
        names = [name for name, _ in rule.tensors(layer)]
        for name, part in zip(names[index[0]], target, strict=True):
            copy_view(rule.to_parameter(self._tensors[name].read())[index[1:]], part)


@partial(jax.jit, donate_argnums=0)
def _replace_layer(layers: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(layers, layer, index, axis=0)
