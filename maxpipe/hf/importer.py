"""Read the weights of a folder of Hugging Face into parameters, layer by layer and shard by shard.

A process reads the bytes of its own shards only, so a model need not fit on any host.
"""

import math
import re
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Sharding

from maxpipe.config.catalog import MODEL_TYPES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import folder_of, read_shape
from maxpipe.config.imports import implementation
from maxpipe.config.options import get
from maxpipe.config.sections import Config
from maxpipe.hf.matching import differences, is_ignored, text_name
from maxpipe.hf.safetensors import SafetensorsError, read_folder
from maxpipe.hf.tensor_table import Path as ParameterPath
from maxpipe.hf.tensors import Rule, tensor_names, tensor_rules
from maxpipe.model.program import ModelProgram

KEY = "init_from"


class HfWeights:
    """The weights of a folder, which have been compared with the model by names and shapes.

    Args:
      config: resolved; `init_from` names the folder.

    Raises:
      ConfigError: something is missing, unknown, of another shape, or damaged; with all names.
    """

    def __init__(self, config: Config):
        directory = self._directory = folder_of(config.init_from)
        self._program = ModelProgram(config.model)
        shape = read_shape(directory, KEY)
        problems = [
            Problem(
                key, f"is {get(config, key)}, but {shape.source} says {value}{_remedy(directory)}"
            )
            for key, value in shape.values.items()
            if get(config, key) != value
        ]
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
        self.num_bytes = sum(
            math.prod(tensor.shape) * (4 if tensor.dtype == "F32" else 2)
            for tensor in self._tensors.values()
        )

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
        rule = self._rules[path]

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            if not rule.is_layer:
                return self._part(rule, 0, index).astype(like.dtype)
            layers = range(self._num_layers)[index[0]]
            shape = [len(range(n)[i]) for n, i in zip(like.shape, index, strict=True)]
            values = np.empty(shape, like.dtype)
            for place, layer in enumerate(layers):
                values[place] = self._part(rule, layer, index[1:])
            return values

        assert isinstance(like.sharding, Sharding)
        return jax.make_array_from_callback(like.shape, like.sharding, shard)

    def _part(self, rule: Rule, layer: int, index: tuple[slice, ...]) -> np.ndarray:
        tensor = self._tensors[rule.template.format(layer=layer)]
        return np.ascontiguousarray(rule.to_parameter(tensor.read())[index])


def _remedy(directory: str) -> str:
    return f"; model.from_hf={directory} takes the shape from there"
