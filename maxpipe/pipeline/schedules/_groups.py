"""Depth-first order over several chunks per stage: microbatches walk through the chunks in groups."""

import numpy as np


def group_microbatches(num_microbatches: int, smallest: int) -> np.ndarray:
    """Sizes of the groups, int [number of groups].

    As many groups as there can be with at least `smallest` microbatches each, as equal as possible: a
    microbatch then comes back to the first stage no earlier than it can, nobody waits, and the largest group,
    which sets the memory, is as small as possible. Fewer microbatches than `smallest` make one group.
    """
    num_groups = max(num_microbatches // smallest, 1)
    size, larger = divmod(num_microbatches, num_groups)
    return np.where(np.arange(num_groups) < larger, size + 1, size)


def depth_first(sizes: np.ndarray, strides: np.ndarray, num_repeats: int) -> np.ndarray:
    """Position of each unit in the order (group, chunk, microbatch of the group), int [M, V].

    Args:
      sizes: microbatches per group.
      strides: positions from a chunk of a group to its next chunk; positions beyond the size stay empty.
      num_repeats: V, chunks.
    """
    group = np.repeat(np.arange(len(sizes)), sizes)
    index = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
    base = (np.cumsum(strides) - strides) * num_repeats
    return (base[group] + index)[:, None] + strides[group][:, None] * np.arange(num_repeats)
