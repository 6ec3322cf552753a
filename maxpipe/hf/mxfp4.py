"""Read weights in mxfp4: blocks of 32 four-bit numbers with a common eight-bit scale.

The format is the OCP Microscaling one (MXFP4, v1.0). Files of gpt-oss have a matrix of each expert
in two tensors of bytes, NAME_blocks [E, F, D / 32, 16] and NAME_scales [E, F, D / 32]; together
they stand for NAME [E, D, F].

Letters: E experts, D and F widths of a matrix, n experts that are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from maxpipe.hf.safetensors import ALL, StoredTensor, WeightTensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_BYTES = 16
_BIAS = 127  # bias of the scales' exponents
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.asarray([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
# The two numbers of each byte, the low bits first: [256, 2]
_OF_BYTE = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], axis=-1)


@dataclass(frozen=True)
class Mxfp4Tensor:
    """The tensor that blocks and scales stand for; it is dequantised while it is read.

    Attributes:
      blocks: uint8 [E, F, D / 32, 16], two numbers in each byte.
      scales: uint8 [E, F, D / 32], exponents of 2.
      dtype: the format's name in messages.
    """

    blocks: StoredTensor
    scales: StoredTensor
    dtype: str = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [E, D, F]."""
        experts, width, groups, size = self.blocks.shape
        return experts, groups * size * 2, width

    @property
    def num_bytes(self) -> int:
        """Return the size in the file."""
        return self.blocks.num_bytes + self.scales.num_bytes

    @property
    def rows_at_once(self) -> int:
        """Return 1: an expert takes eight times as much memory as in files."""
        return 1

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
        if base != name and scales is not None and _are_pair(blocks, scales):
            del tensors[name], tensors[base + _SCALES]
            tensors[base] = Mxfp4Tensor(blocks, scales)
    return tensors


def _are_pair(blocks: StoredTensor, scales: StoredTensor) -> bool:
    are_bytes = blocks.dtype == scales.dtype == "U8"
    return are_bytes and len(scales.shape) == 3 and blocks.shape == (*scales.shape, _BLOCK_BYTES)
