"""Read weights in mxfp4 and in fp8, which are dequantised while they are read.

mxfp4 is the OCP Microscaling format (MXFP4, v1.0): blocks of 32 four-bit numbers with a common
eight-bit scale. Files of gpt-oss have a matrix of each expert in two tensors of bytes, NAME_blocks
[E, F, D / 32, 16] and NAME_scales [E, F, D / 32]; together they stand for NAME [E, D, F].

fp8 has a common scale for each block of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
Files have a matrix as NAME [N, M] of 8-bit floats (e4m3) and NAME_scale_inv [N / b, M / c] of
float32, by which the numbers of a block [b, c] are multiplied. Incomplete blocks at the edges have
scales of their own.

Letters: E experts, D and F widths of a matrix, n experts that are read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from maxpipe.config.model_places import ModelFolder
from maxpipe.hf.safetensors import ALL, SafetensorsError, StoredTensor, WeightTensor

_BLOCKS, _SCALES = "_blocks", "_scales"  # end the names of mxfp4
_BLOCK_BYTES = 16
_BIAS = 127  # bias of the scales' exponents
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.asarray([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
# The two numbers of each byte, the low bits first: [256, 2]
_OF_BYTE = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], axis=-1)
FP8 = "F8_E4M3"
_INVERSE = "_scale_inv"  # ends the names of scales of fp8
_CONFIG, _SECTION, _SIZE = "config.json", "quantization_config", "weight_block_size"
_READ_AT_ONCE = 1 << 24  # numbers, each of which takes four bytes when dequantised


@dataclass(frozen=True)
class Mxfp4Tensor:
    """The tensor [E, D, F] that blocks and scales stand for."""

    blocks: StoredTensor  # uint8 [E, F, D / 32, 16], two numbers in each byte
    scales: StoredTensor  # uint8 [E, F, D / 32], exponents of 2
    dtype: str = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, width, groups, size = self.blocks.shape
        return experts, groups * size * 2, width

    @property
    def num_bytes(self) -> int:
        return self.blocks.num_bytes + self.scales.num_bytes

    @property
    def rows_at_once(self) -> int:
        return 1  # an expert takes eight times as much memory as in files

    def read_rows(self, first: int, stop: int, columns: slice = ALL) -> np.ndarray:
        """Return experts [stop - first, D, columns], float32; no number is rounded."""
        blocks = self.blocks.read_rows(first, stop)[:, columns]  # [n, F, D / 32, 16]
        scales = self.scales.read_rows(first, stop)[:, columns]
        numbers = _OF_BYTE[blocks].reshape(*scales.shape, -1)  # [n, F, D / 32, 32]
        numbers *= np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)[..., None]
        return numbers.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


def joined(stored: Mapping[str, StoredTensor]) -> dict[str, WeightTensor]:
    """Return tensors by name, each pair of blocks and scales as one tensor."""
    tensors: dict[str, WeightTensor] = {**stored}
    for name, blocks in stored.items():
        base = name.removesuffix(_BLOCKS)
        scales = stored.get(base + _SCALES)
        if base != name and scales is not None and _are_mxfp4(blocks, scales):
            del tensors[name], tensors[base + _SCALES]
            tensors[base] = Mxfp4Tensor(blocks, scales)
    return tensors


def _are_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> bool:
    are_bytes = blocks.dtype == scales.dtype == "U8"
    return are_bytes and len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BLOCK_BYTES)


@dataclass(frozen=True)
class Fp8Tensor:
    """The matrix [N, M] that 8-bit floats and scales stand for."""

    numbers: StoredTensor  # e4m3 [N, M]
    scales: StoredTensor  # float32 [N / b, M / c], rounded up
    block: tuple[int, int]  # its size, (b, c)
    dtype: str = "FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def num_bytes(self) -> int:
        return self.numbers.num_bytes + self.scales.num_bytes

    @property
    def rows_at_once(self) -> int:
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
    """Return tensors by name, each pair of fp8 numbers and scales as one tensor; raises
    SafetensorsError if numbers have no scales of the form above.
    """
    tensors = {**stored}
    names = [name for name, tensor in stored.items() if tensor.dtype.startswith("F8")]
    if not names:
        return tensors
    block = _block_size(folder)
    for name in names:
        numbers, scales = stored[name], tensors.pop(name + _INVERSE, None)
        if not _are_fp8(numbers, scales, block):
            raise SafetensorsError(
                f"{folder}: {name} is {numbers.dtype}, which is read as {FP8} with "
                f"{name}{_INVERSE} for blocks of {block[0]} x {block[1]}; convert the weights to "
                "bfloat16"
            )
        assert isinstance(numbers, StoredTensor)
        assert isinstance(scales, StoredTensor)
        tensors[name] = Fp8Tensor(numbers, scales, block)
    return tensors


def _block_size(folder: ModelFolder) -> tuple[int, int]:
    """Return the sizes of a block that config.json names."""
    section = json.loads(folder.read(_CONFIG)).get(_SECTION) or {}
    sizes = section.get(_SIZE)
    sizes = sizes if isinstance(sizes, list) else []
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise SafetensorsError(
            f"{folder} has weights in fp8, but {_CONFIG} no {_SECTION}.{_SIZE}; convert the "
            "weights to bfloat16"
        )
    return sizes[0], sizes[1]


def _are_fp8(numbers: WeightTensor, scales: WeightTensor | None, block: tuple[int, int]) -> bool:
    if scales is None or numbers.dtype != FP8 or len(numbers.shape) != 2:
        return False
    blocks = tuple(-(-size // width) for size, width in zip(numbers.shape, block, strict=True))
    return scales.dtype == "F32" and scales.shape == blocks
