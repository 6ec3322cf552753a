"""Import on demand: implementations of the catalogue, and libraries that only some runs need."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from maxpipe.config.errors import ConfigError, Problem


class Variant(Protocol):
    """An entry of the catalogue that names its implementation."""

    @property
    def implementation(self) -> str: ...


def implementation(variant: Variant) -> Any:
    """Import and return the function or class of a catalogue entry, named "module:attribute"."""
    return attribute_of(variant.implementation)


def attribute_of(name: str) -> Any:
    """Import and return what "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def optional(library: str, extra: str, key: str) -> Iterator[None]:
    """Turn an ImportError of an optional library into an error that tells how to install it.

    Args:
      library: the name under which it is imported.
      extra: the extra of maxpipe that installs it.
      key: the key that asks for it, such as `data.source`.

    Raises:
      ConfigError: the library is not installed, or an installed one cannot be imported; then the
        message gives the reason.
    """
    try:
        yield
    except ImportError as error:
        # fsspec replaces the ImportError of a library by one of its own.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        is_missing = (
            isinstance(cause, ModuleNotFoundError)
            and (cause.name or "").partition(".")[0] == library
        )
        reason = "is not installed" if is_missing else f"cannot be imported ({cause})"
        message = f"needs {library}, which {reason}: pip install 'maxpipe[{extra}]'"
        raise ConfigError(Problem(key, message)) from error
