"""A 32-bit digest of an array that does not depend on how the array is laid out over devices.

Every element's bit pattern is read as 32-bit words, word i becomes mix(word + i * GOLDEN), and the
results are summed, all modulo 2^32. `mix` is the finalizer of MurmurHash3 (Austin Appleby, public
domain), a bijection: a change confined to one word always changes the digest. Other changes go
unnoticed with probability 2^-32. Integer sums do not depend on order, and so not on mesh, sharding
or reduction tree. (Without the mixing, as a sum of weighted words, two flipped sign bits anywhere
in an array would cancel.)
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.devices.host_memory import move

GOLDEN = 0x9E3779B9
_CHUNK = 1 << 17  # words per step on the host, so that two temporaries fit the second-level cache

Words = TypeVar("Words", jax.Array, np.ndarray)


def digests(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    """Return the digests of all arrays; the devices compute those of `jax.Array`s in parallel.

    Args:
      arrays: name -> `jax.Array` of any sharding (with several processes: the same global arrays in
        all of them) or NumPy array; element size 1, 2, 4 or 8 bytes.

    Returns:
      name -> digest in [0, 2^32).
    """
    pending = {name: _start(array) for name, array in arrays.items()}
    # A scalar is replicated, so a local copy suffices even if other processes cannot be reached.
    local = {
        name: digest.addressable_data(0) if isinstance(digest, jax.Array) else digest
        for name, digest in pending.items()
    }
    return {name: int(digest) for name, digest in jax.device_get(local).items()}


def _start(array: jax.Array | np.ndarray) -> jax.Array | int:
    if not isinstance(array, jax.Array):
        return _host_digest(array)
    device_memory = jax.local_devices()[0].default_memory().kind
    if array.sharding.memory_kind in (None, device_memory):
        return device_digest(array)
    # One at a time: the devices may not have room for everything that was moved to the host.
    return device_digest(move(array, device_memory)).block_until_ready()


def _mix(
    word: Words,
    multiply: Callable[[Words, int], Words],
    fold: Callable[[Words, int], Words],
) -> Words:
    """Return MurmurHash3's finalizer of each word; `fold` is word ^ (word >> shift)."""
    word = fold(word, 16)
    word = multiply(word, 0x85EBCA6B)
    word = fold(word, 13)
    word = multiply(word, 0xC2B2AE35)
    return fold(word, 16)


def device_digest(array: jax.Array) -> jax.Array:
    """Return the digest as a uint32 scalar; may be called inside a compiled function."""
    if array.size == 0:
        return jnp.uint32(0)
    # 64-bit arrays can be handled only with x64 on, whatever the calling program uses.
    with jax.enable_x64(array.dtype.itemsize == 8):
        return _compiled()(array)


@functools.cache
def _compiled() -> Callable[[jax.Array], jax.Array]:
    def digest(array: jax.Array) -> jax.Array:
        words = _device_words(array)
        index = jnp.zeros(words.shape, jnp.uint32)
        for dim in range(words.ndim):
            stride = math.prod(words.shape[dim + 1 :]) & 0xFFFFFFFF
            index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride)
        mixed = _mix(
            words + index * np.uint32(GOLDEN),
            multiply=lambda word, factor: word * np.uint32(factor),
            fold=lambda word, shift: word ^ (word >> np.uint32(shift)),
        )
        return jnp.sum(mixed, dtype=jnp.uint32)

    return jax.jit(digest)


def _device_words(array: jax.Array) -> jax.Array:
    """Return bit patterns, uint32, shaped like `array`; 8-byte elements add a last dimension of 2.

    The two words of an 8-byte element are its low and its high half.
    """
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if array.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _host_digest(array: np.ndarray) -> int:
    """Return the same digest of an array in host memory, computed a cache-sized piece at a time."""
    flat = np.ascontiguousarray(array).reshape(-1)
    words = flat.view(np.uint32 if flat.itemsize >= 4 else f"u{flat.itemsize}")
    total = 0
    offsets = np.arange(_CHUNK, dtype=np.uint32) * np.uint32(GOLDEN)
    for start in range(0, words.size, _CHUNK):
        word = words[start : start + _CHUNK].astype(np.uint32)
        word += offsets[: word.size]
        word += np.uint32(start * GOLDEN & 0xFFFFFFFF)
        word = _mix(word, multiply=_multiply_in_place, fold=_fold_in_place)
        total += int(word.sum(dtype=np.uint64))
    return total & 0xFFFFFFFF


def _multiply_in_place(word: np.ndarray, factor: int) -> np.ndarray:
    word *= np.uint32(factor)
    return word


def _fold_in_place(word: np.ndarray, shift: int) -> np.ndarray:
    word ^= word >> np.uint32(shift)
    return word
