"""Optimizers; each module registers one, chosen by `optimizer.name`."""

from maxpipe.registry import Registry

OPTIMIZERS: Registry = Registry(__name__, __path__, "optimizer.name")
