"""Shuffle positions as grain's `index_shuffle` does, with a table where that is slow.

It encrypts a position, in at least 16 bits, until the result is below the number of positions
(cycle walking, Black and Rogaway 2002). Of few positions each takes thousands of encryptions, so
that an epoch takes as long as 2**16 of them. Here all 2**16 are made at once.
"""

from functools import lru_cache

import numpy as np
from grain.experimental import index_shuffle

_FEW = 1 << 12  # positions that have a table; of more, each takes some microseconds
_ROUNDS = 4  # of the cipher


def shuffled(position: int, count: int, seed: int) -> int:
    """Return `index_shuffle(position, max_index=count - 1, seed=seed, rounds=4)`."""
    if 1 < count <= _FEW:
        return int(_table(count, seed)[position])
    return index_shuffle(position, max_index=count - 1, seed=seed, rounds=_ROUNDS)


@lru_cache(maxsize=1024)
def _table(count: int, seed: int) -> np.ndarray:
    """Return the permutation of `count` positions, uint16 [count]."""
    table = _encrypted(_keys(seed))
    while len(table) > count:
        # A walk that ends below `size` is a part of each that ends below `count`.
        size = max(len(table) // 8, count)
        fewer = table[:size].copy()
        on_the_way = np.flatnonzero(fewer >= size)
        while on_the_way.size:
            places = table[fewer[on_the_way]]
            fewer[on_the_way] = places
            on_the_way = on_the_way[places >= size]
        table = fewer
    return table


def _encrypted(keys: list[int]) -> np.ndarray:
    """Return the ciphertexts of all 16-bit blocks: Simon of words of 8 bits, uint16 [2**16]."""
    word = np.arange(256, dtype=np.uint8)
    left, right = np.repeat(word, 256), np.tile(word, 256)
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _mixed(right) ^ np.uint8(first & 255)
        right = right ^ _mixed(left) ^ np.uint8(second & 255)
    return left.astype(np.uint16) << 8 | right


def _mixed(word: np.ndarray) -> np.ndarray:
    return ((word << 1 | word >> 7) & word) ^ (word << 2 | word >> 6)


def _keys(seed: int) -> list[int]:
    """Return a key of 32 bits for each round, as std::seed_seq of C++ makes them of a seed."""
    size, keys = _ROUNDS, [0x8B8B8B8B] * _ROUNDS
    added = [1, 1 + seed, *range(2, size)]
    for k in range(2 * size):
        here, after, last, then = (at % size for at in (k, k + 1, k - 1, k + 2))
        if k < size:
            mix = keys[here] ^ keys[after] ^ keys[last]
            mix = 1664525 * (mix ^ mix >> 27)
            own = (mix + added[k]) % 2**32
            keys[after] = (keys[after] + mix) % 2**32
            keys[then] = (keys[then] + own) % 2**32
        else:
            mix = (keys[here] + keys[after] + keys[last]) % 2**32
            mix = 1566083941 * (mix ^ mix >> 27) % 2**32
            own = (mix - here) % 2**32
            keys[after] ^= mix
            keys[then] ^= own
        keys[here] = own
    return keys
