"""Importing what an entry of the catalogue names."""

import importlib
from typing import Any, Protocol


class Variant(Protocol):
    """An entry of the catalogue that names its implementation."""

    @property
    def implementation(self) -> str: ...


def implementation(variant: Variant) -> Any:
    """Import and return the function or class of a catalogue entry, named "module:attribute"."""
    module, _, attribute = variant.implementation.partition(":")
    return getattr(importlib.import_module(module), attribute)
