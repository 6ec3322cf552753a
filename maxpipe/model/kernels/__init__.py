"""Attention kernels; each module registers one, chosen by `model.attention`.

A variant is built for one configuration: build(config, sequence_length) -> `AttentionFn`, single-device code. Its
`unfit(config, sequence_length)` says why it cannot serve, or returns an empty string.
"""

from typing import Any

from maxpipe.registry import Registry

KERNELS: Registry[Any] = Registry(__name__, __path__, "model.attention")
