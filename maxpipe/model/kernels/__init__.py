"""Attention kernels; each module registers one, chosen by `model.attention`.

A variant is built for one configuration, as single-device code: `build(config, sequence_length)` -> `AttentionFn`, and
`build_parts(config, parts)` -> `PartAttention`, for queries of the tokens parts[i], int32 [C, P]; see
`maxpipe.context_parallel`. Its `unfit(config, sequence_length, num_parts)` says why it cannot serve, or returns an
empty string.
"""

from typing import Any

from maxpipe.registry import Registry

KERNELS: Registry[Any] = Registry(__name__, __path__, "model.attention")
