"""Write files as tools/preprocess_data.py of Megatron-LM does."""

import struct
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write_indexed(
    prefix: object, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "u2"
) -> None:
    """Write PREFIX.bin and PREFIX.idx of documents, each of which is sequences of token ids."""
    sequences = [*chain(*documents)]
    lengths = [len(ids) for ids in sequences]
    positions = [int(dtype[1]) * length for length in accumulate([0, *lengths[:-1]])]
    bounds = [*accumulate([0, *map(len, documents)])]
    with open(f"{prefix}.bin", "wb") as file:
        file.writelines(np.array(ids, f"<{dtype}").tobytes() for ids in sequences)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]))
        file.write(struct.pack("<QQ", len(lengths), len(bounds)))
        for code, values in (("i", lengths), ("q", positions), ("q", bounds)):
            file.write(struct.pack(f"<{len(values)}{code}", *values))
