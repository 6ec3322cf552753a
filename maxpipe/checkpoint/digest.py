"""Compute a 32-bit digest of an array that does not depend on its layout over devices.

The same pass over the array finds out whether all of its numbers are finite.

Every element's bit pattern is read as 32-bit words, word i becomes mix(word + i * GOLDEN), and the
results are summed, all modulo 2^32. `mix` is the finalizer of MurmurHash3 (Austin Appleby, public
domain), a bijection: a change confined to one word always changes the digest. Other changes go
unnoticed with probability 2^-32. Integer sums do not depend on order, and so not on mesh, sharding
or reduction tree. (Without the mixing, as a sum of weighted words, two flipped sign bits anywhere
in an array would cancel.)
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.devices.host_memory import move

GOLDEN = 0x9E3779B9
_CHUNK = 1 << 17  # words per step on the host, so that two temporaries fit the second-level cache

Words = TypeVar("Words", jax.Array, np.ndarray)


class Summary(NamedTuple):
    """The results of one pass over an array; uint32 scalars while devices are computing them."""

    digest: jax.Array | int
    nonfinite: jax.Array | int  # how many numbers are NaN or infinite; 0 for integers
    nonfinite_squares: jax.Array | int  # how many have such a square in the array's dtype


def digests(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    return {name: int(summary.digest) for name, summary in summaries(arrays).items()}


def summaries(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, Summary]:
    """Return name -> summary of all arrays, the same in all processes.

    The devices compute those of `jax.Array`s of any sharding in parallel; with several processes
    these are the same global arrays in all of them. Elements have 1, 2, 4 or 8 bytes.
    """
    pending = {name: _start(array) for name, array in arrays.items()}
    # A scalar is replicated, so a local copy suffices even if other processes cannot be reached.
    local = jax.tree.map(
        lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, pending
    )
    fetched: dict[str, Summary] = jax.device_get(local)
    return {name: Summary(*map(int, summary)) for name, summary in fetched.items()}


def _start(array: jax.Array | np.ndarray) -> Summary:
    if not isinstance(array, jax.Array):
        return _host_summary(array)
    device = jax.local_devices()[0]
    device_memory = device.default_memory().kind
    if array.sharding.memory_kind in (None, device_memory):
        pending = _device_summary(array)
        # One at a time on CPUs: concurrent programs take each other's threads, so that some devices
        # never join a sum that the others wait for, and XLA aborts the process.
        return jax.block_until_ready(pending) if device.platform == "cpu" else pending
    # One at a time: the devices may not have room for everything that was moved to the host.
    return jax.block_until_ready(_device_summary(move(array, device_memory)))


def _mix(word: Words) -> Words:
    """Return MurmurHash3's finalizer of each word; overwrites a NumPy array."""
    word ^= word >> np.uint32(16)
    word *= np.uint32(0x85EBCA6B)
    word ^= word >> np.uint32(13)
    word *= np.uint32(0xC2B2AE35)
    word ^= word >> np.uint32(16)
    return word


def device_digest(array: jax.Array) -> jax.Array:
    """Return the digest as a uint32 scalar; may be called inside a compiled function."""
    return jnp.asarray(_device_summary(array).digest)


def _device_summary(array: jax.Array) -> Summary:
    if array.size == 0:
        return Summary(jnp.uint32(0), 0, 0)
    # 64-bit arrays can be handled only with x64 on, whatever the calling program uses.
    with jax.enable_x64(array.dtype.itemsize == 8):
        return _compiled_summary(array)


@jax.jit
def _compiled_summary(array: jax.Array) -> Summary:
    words = _device_words(array)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = math.prod(words.shape[dim + 1 :]) & 0xFFFFFFFF
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride)
    digest = jnp.sum(_mix(words + index * np.uint32(GOLDEN)), dtype=jnp.uint32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return Summary(digest, 0, 0)
    counts = [jnp.sum(~jnp.isfinite(x), dtype=jnp.uint32) for x in (array, array * array)]
    return Summary(digest, *counts)


def _device_words(array: jax.Array) -> jax.Array:
    """Return uint32 bit patterns, shaped like `array`; 8-byte elements become [..., low, high]."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if array.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _host_summary(array: np.ndarray) -> Summary:
    flat = np.ascontiguousarray(array).reshape(-1)
    words = flat.view(np.uint32 if flat.itemsize >= 4 else f"u{flat.itemsize}")
    is_floating = jnp.issubdtype(array.dtype, jnp.floating)
    words_per_element = 2 if flat.itemsize == 8 else 1
    total = nonfinite = nonfinite_squares = 0
    offsets = np.arange(_CHUNK, dtype=np.uint32) * np.uint32(GOLDEN)
    for start in range(0, words.size, _CHUNK):
        word = words[start : start + _CHUNK].astype(np.uint32)
        word += offsets[: word.size]
        word += np.uint32(start * GOLDEN & 0xFFFFFFFF)
        total += int(_mix(word).sum(dtype=np.uint64))
        if is_floating:
            first = start // words_per_element
            piece = flat[first : first + _CHUNK // words_per_element]
            with np.errstate(over="ignore", invalid="ignore"):
                squares = piece * piece
            nonfinite += int(np.count_nonzero(~np.isfinite(piece)))
            nonfinite_squares += int(np.count_nonzero(~np.isfinite(squares)))
    return Summary(total & 0xFFFFFFFF, nonfinite, nonfinite_squares)
