"""Name each parameter's tensor in Hugging Face's files, and say how one becomes the other.

A rule is invertible: it makes parameters from tensors by reshaping, transposing and taking rows,
and tensors from parameters by the inverse. Parameters are in model order, as on disk, so no rule
depends on pipelines.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.hf.family import Family
from maxpipe.hf.tensor_table import EXPERTS, FUSED, INTERLEAVED, LAYER, NAMES, NORMS, Path
from maxpipe.model.parameters import Params, ParamSpec
from maxpipe.model.program import ModelProgram


@dataclass(frozen=True)
class Rule:
    """How one parameter's tensor is called and laid out."""

    path: Path
    template: str  # name, with {layer}, and {expert} where each expert has a tensor of its own
    sizes: tuple[tuple[str, int], ...]  # of letters, in the file; a vocabulary may be padded
    tensor_letters: tuple[tuple[str, ...], ...]  # of each dimension of the tensor
    letters: tuple[str, ...]  # of each dimension of one layer's parameter, without experts
    rows: tuple[int, int] | None = None  # first row, and rows of the tensor; None if it has all
    columns: tuple[int, int] = (0, 1)  # first index in the tensor's last dimension, and stride
    experts: int = 0  # size of the parameter's first dimension, if each expert has a tensor
    first_layer: int = 0  # index in the file of the first layer
    dtype: np.dtype | None = None  # of the tensor, if it is fixed

    @property
    def is_layer(self) -> bool:
        return self.path[0] == "layers"

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor in the file."""
        shape = self._own_shape
        shape = shape if self.rows is None else (self.rows[1], *shape[1:])
        return (*shape[:-1], shape[-1] * self.columns[1])

    @property
    def own_rows(self) -> slice:
        """Return the rows of the tensor that are this parameter."""
        first = 0 if self.rows is None else self.rows[0]
        return slice(first, first + self._own_shape[0])

    @property
    def own_columns(self) -> slice:
        """Return the indices of the tensor's last dimension that are this parameter."""
        return slice(self.columns[0], None, self.columns[1])

    def own_part(self, tensor: np.ndarray) -> np.ndarray:
        """Return the view of the whole tensor that is this parameter."""
        return tensor[self.own_rows][..., self.own_columns]

    def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each tensor of a layer's parameter: its name, and its index there, () for all."""
        layer += self.first_layer
        if not self.experts:
            yield self.template.format(layer=layer), ()
        for expert in range(self.experts):
            yield self.template.format(layer=layer, expert=expert), (expert,)

    @property
    def row_axis(self) -> int:
        """Return the dimension of the parameter whose slices are contiguous rows of the tensor."""
        return self.letters.index(self.tensor_letters[0][0])

    @property
    def num_slices(self) -> int:
        return self._size(self.tensor_letters[0][0])

    @property
    def rows_of_slice(self) -> int:
        """Return how many rows of the tensor one index of `row_axis` has."""
        return math.prod(map(self._size, self.tensor_letters[0][1:]))

    def to_parameter(self, tensor: np.ndarray) -> np.ndarray:
        """Return one layer's parameter from the whole tensor, as a view where possible."""
        return self.from_rows(self.own_part(tensor))

    def from_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return some slices of one layer's parameter along `row_axis`, from the tensor's rows that
        hold them, in the parameter's columns.
        """
        split = rows.reshape([-1, *(self._size(n) for n in self._tensor_order[1:])])
        return split.transpose([self._tensor_order.index(n) for n in self.letters])

    def to_tensor(self, parameter: np.ndarray) -> np.ndarray:
        """Return this parameter's part of the tensor, without padding; inverts `to_parameter`."""
        parameter = parameter[tuple(slice(self._size(n)) for n in self.letters)]
        joined = parameter.transpose([self.letters.index(n) for n in self._tensor_order])
        return joined.reshape(self._own_shape)

    @property
    def _own_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(map(self._size, letters)) for letters in self.tensor_letters)

    @property
    def _tensor_order(self) -> list[str]:
        return [n for letters in self.tensor_letters for n in letters]

    def _size(self, letter: str) -> int:
        return dict(self.sizes)[letter]


def tensor_rules(family: Family, program: ModelProgram) -> list[Rule]:
    """Return a rule for each parameter of a model; a layer parameter's rule holds for any layer.

    Raises ConfigError if a block that is not maxpipe's has parameters that have no name in files.
    """
    specs = dict(spec_leaves(program.specs))
    rules = {path: _rule(path, spec, program, family) for path, spec in specs.items()}
    if family.fuses_projections:
        for name, paths in FUSED.items():
            counts = [rules[path].tensor_shape[0] for path in paths]
            for i, path in enumerate(paths):
                rows = sum(counts[:i]), sum(counts)
                rules[path] = replace(rules[path], template=f"{LAYER}{name}", rows=rows)
    return list(rules.values())


def _rule(path: Path, spec: ParamSpec, program: ModelProgram, family: Family) -> Rule:
    norms, prefix = NORMS[program.config.norm_placement], LAYER
    original = path
    if is_first := path[:2] == ("embed", "first"):
        # The first dense layers are not stacked: each has rules of its own.
        prefix, path = LAYER.format(layer=path[2]), ("layers", *path[3:])
    if path in NAMES:
        name, pattern = NAMES[path]
    elif path in EXPERTS[family.expert_names]:
        name, pattern = EXPERTS[family.expert_names][path]
    elif len(path) == 3 and path[1] in norms:
        name, pattern = f"{norms[path[1]]}_layernorm.weight", "d -> d"
    elif path[1:2] != ("attention",):
        message = f"{program.config.block} has {'.'.join(path)}, which no file of Hugging Face has"
        raise ConfigError(Problem("model.block", message))
    else:
        # A norm over all heads is one vector in the file.
        name = f"self_attn.{path[2][0]}_norm.weight"
        pattern = "c -> c" if len(spec.shape) == 1 else "(h c) -> h c"
    left, _, right = pattern.partition(" -> ")
    letters = tuple(right.split())
    experts = spec.shape[0] if "{expert}" in name else 0
    turns = INTERLEAVED.get(name, (path,))
    sizes = dict(zip(letters, spec.shape[1:] if experts else spec.shape, strict=True))
    if "v" in sizes:
        sizes["v"] = program.config.num_token_ids
    is_layer = path[0] == "layers" and not is_first
    return Rule(
        original,
        f"{prefix}{name}" if path[0] == "layers" else name,
        tuple(sizes.items()),
        tuple(_dimensions(left)),
        letters,
        columns=(turns.index(path), len(turns)),
        experts=experts,
        first_layer=program.config.first_dense_layers if is_layer else 0,
        dtype=spec.dtype if is_selection_bias(spec) else None,
    )


def is_selection_bias(spec: ParamSpec) -> bool:
    """Return whether a parameter biases expert selection, in steps too small for bfloat16."""
    return "expert_bias" in spec.axes


def _dimensions(pattern: str) -> Iterator[tuple[str, ...]]:
    """Yield the letters of each dimension of `(h c) d`."""
    for word in re.findall(r"\(.*?\)|\w+", pattern):
        yield tuple(word.strip("()").split())


def spec_leaves(specs: Params) -> Iterator[tuple[Path, ParamSpec]]:
    """Yield the path and spec of each parameter."""
    flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda s: isinstance(s, ParamSpec))
    for path, spec in flat:
        yield tuple(str(key.key) for key in path), spec


def rules_by_tensor(rules: Sequence[Rule], num_layers: int) -> dict[str, Rule]:
    """Return a rule of every tensor that a model's files have, by the tensor's name."""
    return {
        name: rule
        for rule in rules
        for layer in range(num_layers if rule.is_layer else 1)
        for name, _ in rule.tensors(layer)
    }


def tensor_names(rules: Sequence[Rule], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a model's files have."""
    by_tensor = rules_by_tensor(rules, num_layers)
    return {name: rule.tensor_shape for name, rule in by_tensor.items()}
