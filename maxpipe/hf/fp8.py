"""Read weights in fp8 with a common scale for each block of a matrix, as DeepSeek-V3 has them.

Files have a matrix as NAME [N, M] of 8-bit floats (e4m3) and NAME_scale_inv [N / b, M / c] of
float32, by which the numbers of a block [b, c] are multiplied (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2). Incomplete blocks at the edges have scales of their own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from maxpipe.config.model_places import ModelFolder
from maxpipe.hf.safetensors import ALL, SafetensorsError, StoredTensor, WeightTensor

FP8 = "F8_E4M3"
_SCALES = "_scale_inv"
_CONFIG, _SECTION, _SIZE = "config.json", "quantization_config", "weight_block_size"
_READ_AT_ONCE = 1 << 24  # numbers, each of which takes four bytes when dequantised


@dataclass(frozen=True)
class Fp8Tensor:
    """The matrix that 8-bit floats and scales stand for; it is dequantised while it is read.

    Attributes:
      numbers: e4m3 [N, M].
      scales: float32 [N / b, M / c], rounded up.
      block: the size of a block, (b, c).
      dtype: the format's name in messages.
    """

    numbers: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    dtype: str = "FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [N, M]."""
        return self.numbers.shape

    @property
    def num_bytes(self) -> int:
        """Return the size in the file."""
        return self.numbers.num_bytes + self.scales.num_bytes

    @property
    def rows_at_once(self) -> int:
        """Return how many rows to read at a time; dequantised they are four times as large."""
        most = max(1, _READ_AT_ONCE // self.shape[1])
        return min(most, self.numbers.rows_at_once or most)

    def read_rows(self, first: int, stop: int, columns: slice = ALL) -> np.ndarray:
        """Return rows [stop - first, columns], float32."""
        rows, width = self.block
        numbers = self.numbers.read_rows(first, stop, columns).astype(np.float32)
        scales = self.scales.read()[np.arange(first, stop) // rows]
        numbers *= scales[:, np.arange(self.shape[1])[columns] // width]
        return numbers


def dequantised(stored: Mapping[str, WeightTensor], folder: ModelFolder) -> dict[str, WeightTensor]:
    """Return tensors by name, each pair of fp8 numbers and scales as one tensor.

    Raises:
      SafetensorsError: numbers in fp8 have no scales of the form above.
    """
    tensors = {**stored}
    names = [name for name, tensor in stored.items() if tensor.dtype.startswith("F8")]
    if not names:
        return tensors
    block = _block_size(folder)
    for name in names:
        numbers, scales = stored[name], tensors.pop(name + _SCALES, None)
        if not _are_pair(numbers, scales, block):
            raise SafetensorsError(
                f"{folder}: {name} is {numbers.dtype}, which is read as {FP8} with {name}{_SCALES} "
                f"for blocks of {block[0]} x {block[1]}; convert the weights to bfloat16"
            )
        assert isinstance(numbers, StoredTensor)
        assert isinstance(scales, StoredTensor)
        tensors[name] = Fp8Tensor(numbers, scales, block)
    return tensors


def _block_size(folder: ModelFolder) -> tuple[int, int]:
    """Return the sizes of a block that config.json names.

    Raises:
      SafetensorsError: it names no block sizes.
    """
    section = json.loads(folder.read(_CONFIG)).get(_SECTION) or {}
    sizes = section.get(_SIZE)
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(_is_size(n) for n in sizes)):
        raise SafetensorsError(
            f"{folder} has weights in fp8, but {_CONFIG} no {_SECTION}.{_SIZE}; convert the "
            "weights to bfloat16"
        )
    return sizes[0], sizes[1]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _are_pair(numbers: WeightTensor, scales: WeightTensor | None, block: tuple[int, int]) -> bool:
    if scales is None or numbers.dtype != FP8 or len(numbers.shape) != 2:
        return False
    blocks = tuple(-(-size // width) for size, width in zip(numbers.shape, block, strict=True))
    return scales.dtype == "F32" and scales.shape == blocks
