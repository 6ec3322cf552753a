"""A registry of variants, one module each: the module's name is the variant's name.

A package that holds variants creates one `Registry` in its `__init__.py`; each module registers its one object
with the decorator. Names come from the file listing, so that listing the choices imports nothing.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Variants of one kind.

    Args:
      package: dotted name of the package whose modules are the variants, usually `__name__`.
      path: the package's `__path__`.
      key: the configuration key that selects a variant; named in error messages.
    """

    def __init__(self, package: str, path: list[str], key: str):
        self._package = package
        self._path = path
        self._key = key
        self._variants: dict[str, T] = {}

    def names(self) -> list[str]:
        """Sorted names of all variants, without importing any."""
        return sorted(m.name for m in pkgutil.iter_modules(self._path) if not m.name.startswith("_"))

    def register(self) -> Callable[[T], T]:
        """Decorator: the decorated object becomes the variant named like its module."""

        def add(variant: T) -> T:
            name = variant.__module__.rpartition(".")[2]
            assert name not in self._variants, f"{self._package}.{name} registers two variants"
            self._variants[name] = variant
            return variant

        return add

    def get(self, name: str) -> T:
        """Imports and returns the variant.

        Raises:
          ValueError: there is no such variant; the message lists the choices.
        """
        if name not in self.names():
            raise ValueError(f"{self._key}={name!r} does not exist; choose one of {', '.join(self.names())}")
        importlib.import_module(f"{self._package}.{name}")
        return self._variants[name]
