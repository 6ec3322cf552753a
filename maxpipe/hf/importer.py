"""Read the weights of a Hugging Face folder into parameters, layer by layer and shard by shard.

A process reads what its own shards need, so a model need not fit on any host.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from maxpipe.checkpoint.arrays import Box as Region
from maxpipe.checkpoint.arrays import box_of
from maxpipe.config.catalog import MODEL_TYPES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import FILE, TIED, read_shape
from maxpipe.config.imports import implementation
from maxpipe.config.model_places import folder_of, open_folder
from maxpipe.config.sections import Config
from maxpipe.hf.matching import (
    HEAD,
    differences,
    has_own_head,
    is_ignored,
    shape_problems,
    text_name,
)
from maxpipe.hf.quantised import dequantised, joined
from maxpipe.hf.safetensors import INDEX, WEIGHTS, SafetensorsError, copy_view, read_folder
from maxpipe.hf.tensor_table import Path as ParameterPath
from maxpipe.hf.tensors import Rule, tensor_names, tensor_rules
from maxpipe.model.program import ModelProgram
from maxpipe.telemetry.console import format_bytes

KEY = "init_from"


class HfWeights:
    """The weights of the folder `init_from`, whose names and shapes were checked against the model.

    `ignored` are names of tensors that the model does not use, `num_bytes` and `num_elements` the
    total size of all others. Raises ConfigError, with all their names, if tensors are missing,
    unknown, of another shape, or damaged.
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
            folder = open_folder(directory, KEY)
            tensors = read_folder(folder)
            stored = joined({text_name(name): tensor for name, tensor in tensors.items()})
            stored = dequantised(stored, folder)
            is_whole = any(str(tensor.file).endswith(f"/{WEIGHTS}") for tensor in tensors.values())
            self._skips_index = is_whole and INDEX in folder.names()
        except SafetensorsError as error:
            raise ConfigError(*(Problem(KEY, line) for line in error.args)) from None
        except OSError as error:
            raise ConfigError(Problem(KEY, str(error))) from None
        self._num_layers = config.model.stacked_layers
        expected = tensor_names(list(self._rules.values()), self._num_layers)
        tied = config.model.tie_embeddings
        self._is_untied = shape.values[TIED] and not tied
        if tied and has_own_head(stored):
            message = f"{directory}: {HEAD} is not the embedding table; set {TIED}=false to use it"
            raise ConfigError(Problem(KEY, message))
        self.ignored = sorted(
            name for name in stored if is_ignored(name, config.model.num_layers, tied)
        )
        self._tensors = {name: stored[name] for name in stored.keys() - {*self.ignored}}
        if lines := [*differences(self._tensors, expected)]:
            raise ConfigError(*(Problem(KEY, f"{directory}: {line}") for line in lines))
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())
        self.num_elements = sum(math.prod(tensor.shape) for tensor in self._tensors.values())
        self._files = {text_name(name): tensor.file for name, tensor in tensors.items()}
        self._largest = max(tensor.num_bytes for tensor in self._tensors.values())

    def describe(self) -> list[str]:
        """Return lines about what is read and what is left out."""
        size = f"{format_bytes(self.num_bytes)} in {len(self._tensors)} tensors"
        lines = [f"init_from   {self._directory}: {size}, the optimizer starts at zero"]
        if self.ignored:
            kinds = sorted({re.sub(r"\d+", "*", name) for name in self.ignored})
            lines.append(f"init_from   not part of the model: {', '.join(kinds)}")
        if self._is_untied:
            text = f"{HEAD} is not the embedding table, so they are not tied, whatever {FILE} says"
            lines.append(f"init_from   {text}")
        if self._skips_index:
            lines.append(f"init_from   {WEIGHTS} is read, as by transformers, and {INDEX} is not")
        return lines

    def read(
        self,
        path: ParameterPath,
        like: jax.ShapeDtypeStruct,
        advance: Callable[[float], None] = lambda share: None,
    ) -> jax.Array:
        """Return a parameter in the layout on disk, [stacked_layers, ...] for layers.

        Each tensor is read once, however many devices have parts of it. `like` has the shape, dtype
        and sharding of the result, and `advance` is called after each layer with the share that has
        been read. Raises ConfigError, naming tensor and file, if numbers are not finite.
        """
        assert isinstance(like.sharding, Sharding)
        places = like.sharding.addressable_devices_indices_map(like.shape)
        regions = {device: box_of(index, like.shape) for device, index in places.items()}
        rule = self._rules[path]
        if not rule.is_layer:
            parts = self._read_tensor(rule, 0, {*regions.values()}, like.dtype)
            shards = [jax.device_put(parts[region], device) for device, region in regions.items()]
        else:
            shards = self._read_layers(rule, regions, like.dtype, advance)
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)

    def _read_layers(
        self,
        rule: Rule,
        regions: Mapping[jax.Device, Region],
        dtype: np.dtype,
        advance: Callable[[float], None],
    ) -> list[jax.Array]:
        """Return each device's shard, large ones assembled on the devices, layer by layer."""
        size = sum(math.prod(shape_of(region)) for region in {*regions.values()}) * dtype.itemsize
        if size <= self._largest:
            shards = {region: np.empty(shape_of(region), dtype) for region in regions.values()}
            for layer, layer_regions in self._layers(regions.values()):
                parts = self._read_tensor(rule, layer, {r[1:] for r in layer_regions}, dtype)
                for region in layer_regions:
                    shards[region][layer - region[0][0]] = parts[region[1:]]
                advance((layer + 1) / self._num_layers)
            return [jax.device_put(shards[region], device) for device, region in regions.items()]
        values = {
            device: jnp.empty(shape_of(region), dtype, device=device)
            for device, region in regions.items()
        }
        for layer, layer_regions in self._layers(regions.values()):
            parts = self._read_tensor(rule, layer, {r[1:] for r in layer_regions}, dtype)
            for device, region in regions.items():
                if region in layer_regions:
                    place = np.int32(layer - region[0][0])
                    part = jax.device_put((parts[region[1:]], place), device)
                    values[device] = _replace_layer(values[device], *part)
            # The next layer is read after this one is freed.
            jax.block_until_ready([*values.values()])
            advance((layer + 1) / self._num_layers)
        return [*values.values()]

    def _layers(self, regions: Iterable[Region]) -> Iterator[tuple[int, set[Region]]]:
        """Yield each layer that this process has parts of, with the regions that contain it."""
        for layer in range(self._num_layers):
            layer_regions = {r for r in regions if r[0][0] <= layer < r[0][1]}
            if layer_regions:
                yield layer, layer_regions

    def _read_tensor(
        self, rule: Rule, layer: int, regions: Set[Region], dtype: np.dtype
    ) -> dict[Region, np.ndarray]:
        """Return regions of one layer's parameter; what lies between them may be read, too."""
        if not rule.experts:
            ((name, _),) = rule.tensors(layer)
            return self._read_matrix(name, rule, regions, dtype)
        parts = {region: np.empty(shape_of(region), dtype) for region in regions}
        for name, (expert,) in rule.tensors(layer):
            of_expert = {r for r in regions if r[0][0] <= expert < r[0][1]}
            if of_expert:
                matrices = self._read_matrix(name, rule, {r[1:] for r in of_expert}, dtype)
                for region in of_expert:
                    parts[region][expert - region[0][0]] = matrices[region[1:]]
        return parts

    def _read_matrix(
        self, name: str, rule: Rule, regions: Set[Region], dtype: np.dtype
    ) -> dict[Region, np.ndarray]:
        """Return regions of the parameter that one tensor holds, with zeros for padding."""
        tensor = self._tensors[name]
        parts = {region: np.zeros(shape_of(region), dtype) for region in regions}
        axis, rows = rule.row_axis, rule.rows_of_slice
        end = min(max(region[axis][1] for region in regions), rule.num_slices)
        start = min(region[axis][0] for region in regions)
        most = max(1, end - start)  # all at once from a mapped file
        if tensor.rows_at_once:
            most = max(1, tensor.rows_at_once // rows)
        for first in range(start, end, most):
            stop = min(first + most, end)
            offset = rule.own_rows.start
            ends = (offset + first * rows, offset + stop * rows)
            block = tensor.read_rows(*ends, rule.own_columns)
            values = rule.from_rows(block)
            for region, part in parts.items():
                low, high = max(first, region[axis][0]), min(stop, region[axis][1])
                if low < high:
                    source = [slice(*bounds) for bounds in region]
                    target = [slice(None)] * len(region)
                    source[axis] = slice(low - first, high - first)
                    target[axis] = slice(low - region[axis][0], high - region[axis][0])
                    copy_view(values[tuple(source)], part[tuple(target)])
        if not all(np.isfinite(part).all() for part in parts.values()):
            message = f"{self._files.get(name, self._directory)}: {name} has NaN or infinity"
            raise ConfigError(Problem(KEY, f"{message}; take an intact copy of the file"))
        return parts


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(stop - start for start, stop in region)


@partial(jax.jit, donate_argnums=0)
def _replace_layer(layers: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(layers, layer, index, axis=0)
