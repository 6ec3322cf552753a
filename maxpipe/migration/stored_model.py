"""Name the parameters of MaxText's dense decoders, and read them from a checkpoint's arrays.

Both programs have the same dimensions: [D, H, C] for queries, [H, C, D] for outputs, [D, F] for the
MLP. With `scan_layers` a parameter of all layers is one array, [D, layers, ...] with
`param_scan_axis=1`; without it each layer has arrays of its own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from maxpipe.checkpoint.arrays import Box
from maxpipe.config.errors import Problem
from maxpipe.config.sections import ModelConfig
from maxpipe.hf.tensors import spec_leaves
from maxpipe.migration.orbax_arrays import FLOATS
from maxpipe.model.program import ModelProgram

if TYPE_CHECKING:
    import tensorstore as ts

Path: TypeAlias = tuple[str, ...]  # path of one of our parameters

LAYERS = "layers"
_ATTENTION = "self_attention."
_NAMES: dict[Path, str] = {
    ("embed", "embedding"): "token_embedder.embedding",
    ("head", "norm", "scale"): "decoder.decoder_norm.scale",
    ("head", "kernel"): "decoder.logits_dense.kernel",
    (LAYERS, "attention_norm", "scale"): "pre_self_attention_layer_norm.scale",
    (LAYERS, "mlp_norm", "scale"): "post_self_attention_layer_norm.scale",
    (LAYERS, "attention", "query"): f"{_ATTENTION}query.kernel",
    (LAYERS, "attention", "key"): f"{_ATTENTION}key.kernel",
    (LAYERS, "attention", "value"): f"{_ATTENTION}value.kernel",
    (LAYERS, "attention", "out"): f"{_ATTENTION}out.kernel",
    (LAYERS, "attention", "query_bias"): f"{_ATTENTION}query.bias",
    (LAYERS, "attention", "key_bias"): f"{_ATTENTION}key.bias",
    (LAYERS, "attention", "value_bias"): f"{_ATTENTION}value.bias",
    (LAYERS, "attention", "query_norm", "scale"): f"{_ATTENTION}query_norm.scale",
    (LAYERS, "attention", "key_norm", "scale"): f"{_ATTENTION}key_norm.scale",
    (LAYERS, "mlp", "gate"): "mlp.wi_0.kernel",
    (LAYERS, "mlp", "up"): "mlp.wi_1.kernel",
    (LAYERS, "mlp", "down"): "mlp.wo.kernel",
}
# The options of these MaxText blocks; with others their weights would have another meaning.
_LEGAL: dict[str, tuple[object, ...]] = {
    "norm_placement": ("pre",),
    "norm_offset": (False,),
    "query_scale": (0,),
    "embed_scale": (1,),
    "residual_scale": (1,),
    "rope_fraction": (1,),
    "mlp_activation": ("silu", "gelu_tanh"),
    "qk_norm_scope": ("head",),
}
_SCANNED = "decoder.layers."
_SCAN_AXES = (1, 0)  # values of `param_scan_axis`, MaxText's default first
_UNREADABLE = {
    ".pipeline_module.": "stages of a pipeline are not read; unpipelined layers are",
    ".qkv_proj.": "under fused_qkv heads lie as MaxText's tensor parallelism has cut them",
    ".mlp.wi.": "fused_mlp is not read",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a MaxText model, by its name in the model or in a layer.

    Attributes:
      shape: shape of one layer's parameter, without padding of the vocabulary.
      vocab_axis: the dimension of the vocabulary.
      factor: number by which the values are multiplied.
      splits_pairs: whether channels 2i and 2i + 1 of the last dimension, which MaxText rotates as a
        pair, become i and i + C/2.
    """

    name: str
    shape: tuple[int, ...]
    vocab_axis: int | None = None
    factor: float = 1.0
    splits_pairs: bool = False


def divides_scores(m: ModelConfig) -> bool:
    """Return whether the block divides scores by the root of head_dim: qwen2's and qwen3's do.

    llama2 and mistral have this factor in their query weights.
    """
    return m.attention_bias or m.qk_norm


def rotates_neighbours(m: ModelConfig) -> bool:
    """Return whether MaxText rotates pairs of neighbouring channels: with Llama 3.1's scaling."""
    return m.rope_scaling.type == "llama3" and m.rope_scaling.factor > 1


def parameters(m: ModelConfig) -> dict[Path, Parameter]:
    """Return the MaxText counterpart of each parameter of a resolved model, by its path."""
    splits_pairs = rotates_neighbours(m) and not m.rope_interleaved
    named = {}
    for path, spec in spec_leaves(ModelProgram(m).specs):
        sublayer, kind = path[1:2], path[-2 if path[-1] == "scale" else -1].partition("_")[0]
        is_rotated = sublayer == ("attention",) and kind in ("query", "key")
        factor = 1.0 if divides_scores(m) or path[-1] != "query" else math.sqrt(m.head_dim)
        axis = spec.axes.index("vocab") if "vocab" in spec.axes else None
        shape = tuple(m.num_token_ids if i == axis else n for i, n in enumerate(spec.shape))
        named[path] = Parameter(_NAMES[path], shape, axis, factor, splits_pairs and is_rotated)
    return named


def model_problems(m: ModelConfig) -> list[Problem]:
    """Return a problem for each key of a resolved model that none of MaxText's blocks has."""
    problems = [
        Problem(
            f"model.{key}",
            f"must be {' or '.join(map(str, legal))} for weights of MaxText, is {getattr(m, key)}",
        )
        for key, legal in _LEGAL.items()
        if getattr(m, key) not in legal
    ]
    paths = [path for path, _ in spec_leaves(ModelProgram(m).specs)]
    unnamed = [".".join(path) for path in paths if path not in _NAMES]
    if unnamed and not problems:
        message = f"the model has {', '.join(unnamed)}, which MaxText's blocks have not"
        problems.append(Problem("model", message))
    return problems


class StoredModel:
    """The arrays of a checkpoint by name, compared with the parameters of a model by path.

    `vocab_size` counts padding, too.

    Attributes:
      scan_axis: the dimension of the layers, None if each layer has arrays of its own.
      differences: a line for each array that is missing, unknown, or of another shape or dtype.
      num_bytes, num_elements: total size of all arrays.
    """

    def __init__(
        self,
        arrays: Mapping[str, "ts.TensorStore"],
        parameters: Mapping[Path, Parameter],
        num_layers: int,
        vocab_size: int,
    ):
        self._arrays = arrays
        self._parameters = parameters
        self._num_layers = num_layers
        self._vocab_size = vocab_size
        is_scanned = any(name.startswith(_SCANNED) for name in arrays)
        self.scan_axis: int | None = None
        self.differences = [*self._differences(None)]
        if is_scanned:
            by_axis = {axis: [*self._differences(axis)] for axis in _SCAN_AXES}
            self.scan_axis = min(by_axis, key=lambda axis: len(by_axis[axis]))
            self.differences = by_axis[self.scan_axis]
        sizes = {name: math.prod(array.shape) for name, array in arrays.items()}
        self.num_elements = sum(sizes.values())
        self.num_bytes = sum(
            size * arrays[name].dtype.numpy_dtype.itemsize for name, size in sizes.items()
        )

    def read(self, path: Path, box: Box) -> np.ndarray:
        """Return a part of a parameter, [layers, ...] for layers, in the arrays' dtype."""
        parameter = self._parameters[path]
        if path[0] != LAYERS:
            return _read(self._arrays[parameter.name], parameter, box)
        if self.scan_axis is not None:
            # TensorStore reads in the order of the view, so nothing is transposed here.
            array = self._arrays[f"{_SCANNED}{parameter.name}"]
            axis = min(self.scan_axis, array.ndim - 1)
            order = [axis, *(i for i in range(array.ndim) if i != axis)]
            return _read(array.transpose(order), parameter, box)
        (first, stop), inner = box[0], box[1:]
        names = (_layer_name(parameter, layer) for layer in range(first, stop))
        return np.stack([_read(self._arrays[name], parameter, inner) for name in names])

    def _differences(self, scan_axis: int | None) -> Iterator[str]:
        """Yield a line for each array that does not fit, given the dimension of the layers."""
        expected = dict(self._expected(scan_axis))
        for name in sorted(self._arrays.keys() - expected.keys()):
            reasons = [f": {why}" for part, why in _UNREADABLE.items() if part in f".{name}"]
            yield f"{name} is not part of the model{''.join(reasons)}"
        for name in sorted(expected.keys() - self._arrays.keys()):
            yield f"{name} is missing"
        for name in sorted(expected.keys() & self._arrays.keys()):
            shape, array = expected[name], self._arrays[name]
            if array.shape != shape:
                yield f"{name} has shape {[*array.shape]}, the model {[*shape]}"
            elif array.dtype.name not in FLOATS:
                yield f"{name} is {array.dtype.name}; only {', '.join(FLOATS)} are read"

    def _expected(self, scan_axis: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every array of the model."""
        for path, parameter in self._parameters.items():
            if path[0] != LAYERS:
                yield parameter.name, self._shape(parameter)
            elif scan_axis is None:
                for layer in range(self._num_layers):
                    yield _layer_name(parameter, layer), parameter.shape
            else:
                shape = [*parameter.shape]
                shape.insert(min(scan_axis, len(shape)), self._num_layers)
                yield f"{_SCANNED}{parameter.name}", tuple(shape)

    def _shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of a parameter outside layers, with the padded rows that are on disk."""
        axis, array = parameter.vocab_axis, self._arrays.get(parameter.name)
        if axis is None or array is None or array.ndim != len(parameter.shape):
            return parameter.shape
        rows = min(max(array.shape[axis], parameter.shape[axis]), self._vocab_size)
        return (*parameter.shape[:axis], rows, *parameter.shape[axis + 1 :])


def _layer_name(parameter: Parameter, layer: int) -> str:
    return f"decoder.layers_{layer}.{parameter.name}"


def _read(array: "ts.TensorStore", parameter: Parameter, box: Box) -> np.ndarray:
    """Return a box of an array whose last dimensions are the parameter's.

    Rows that the array lacks because the vocabulary is padded are zero.
    """
    values = np.zeros([stop - first for first, stop in box], array.dtype.numpy_dtype)
    ends = [min(stop, size) for (_, stop), size in zip(box, array.shape, strict=True)]
    on_disk: list[slice | list[int]] = [
        slice(first, end) for (first, _), end in zip(box, ends, strict=True)
    ]
    if all(first < end for (first, _), end in zip(box, ends, strict=True)):
        if parameter.splits_pairs:
            on_disk[-1] = _neighbours(array.shape[-1])[slice(*box[-1])]
        part = tuple(slice(end - first) for (first, _), end in zip(box, ends, strict=True))
        values[part] = array[tuple(on_disk)].read().result()
    return values if parameter.factor == 1 else values * np.float32(parameter.factor)


def _neighbours(size: int) -> list[int]:
    """Return each half-split channel's index in the order of neighbours: 0, 2, ..., 1, 3, ..."""
    return [*range(0, size, 2), *range(1, size, 2)]
