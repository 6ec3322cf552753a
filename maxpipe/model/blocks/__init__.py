"""Decoder blocks; each module registers one, chosen by `model.block`."""

from maxpipe.registry import Registry

BLOCKS: Registry = Registry(__name__, __path__, "model.block")
