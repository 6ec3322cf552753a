"""Write files as tools/preprocess_data.py of Megatron-LM does."""

import struct
from itertools import accumulate, chain

import numpy as np

CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write_indexed(prefix: object, documents: list[list[list[int]]], dtype: str = "u2") -> None:
    """Write PREFIX.bin and PREFIX.idx of documents, each of which is sequences of token ids."""
    sequences = [np.array(ids, f"<{dtype}").tobytes() for ids in chain(*documents)]
    sizes, width = [len(content) for content in sequences], int(dtype[1])
    bounds = [*accumulate(map(len, documents), initial=0)]
    with open(f"{prefix}.bin", "wb") as file:
        file.writelines(sequences)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype]))
        file.write(struct.pack("<QQ", len(sizes), len(bounds)))
        file.write(struct.pack(f"<{len(sizes)}i", *(size // width for size in sizes)))
        file.write(struct.pack(f"<{len(sizes)}q", *[*accumulate(sizes, initial=0)][:-1]))
        file.write(struct.pack(f"<{len(bounds)}q", *bounds))
