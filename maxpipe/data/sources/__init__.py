"""Data sources; each module registers one, chosen by `data.source`."""

from maxpipe.registry import Registry

SOURCES: Registry = Registry(__name__, __path__, "data.source")
