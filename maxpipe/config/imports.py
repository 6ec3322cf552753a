"""Import on demand: implementations of the catalogue, users' variants, optional libraries.

A user's module adds its variants to the catalogue when it is imported: `--import MODULE` names it
for one command, and an installed package names it as an entry point of the group `maxpipe.variants`
for all commands.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from maxpipe.config.catalog import Engine, Variant
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.shipped import is_checkout

ENTRY_POINTS = "maxpipe.variants"
OWN_VARIANTS = "one of your own: --import MODULE"


def implementation(variant: Variant | Engine) -> Any:
    """Import and return the function or class of a catalogue entry, see `attribute_of`."""
    return attribute_of(variant.implementation)


def attribute_of(name: str) -> Any:
    """Import and return what a catalogue entry names as "module:attribute"; raises ConfigError if
    a variant of a user cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if module.startswith("maxpipe."):
            raise
        message = f"cannot import {name}, which the catalogue names: {error}"
        raise ConfigError(Problem("", message)) from error


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--import MODULE`, whose values are in `imports` of the parsed flags."""
    about = "import a module that adds variants of your own; may be repeated"
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE", help=about
    )


def import_variants(modules: Sequence[str]) -> None:
    """Import users' variants: those of installed packages, then the modules named.

    The working directory is searched for modules, too. A package that cannot be imported is
    reported on stderr, and its variants are missing.

    Raises:
      ConfigError: a named module cannot be imported.
    """
    if modules and os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # where `python -m` looks and a console command does not
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            print(f"the variants of {package} are missing: {_reason(error)}", file=sys.stderr)
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            message = f"cannot import {module}: {_reason(error)}"
            raise ConfigError(Problem("--import", message)) from error


def import_words(modules: Sequence[str]) -> list[str]:
    """Return the words by which another command imports these modules, too."""
    return [word for module in modules for word in ("--import", module)]


def _reason(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    is_elsewhere = frames and "importlib" not in frames[-1].filename
    return f"{type(error).__name__}: {error}{place if is_elsewhere else ''}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from a checkout, or from a package index."""
    return f"pip install -e '.[{extra}]'" if is_checkout() else f"pip install 'maxpipe[{extra}]'"


def is_installed(library: str) -> bool:
    """Return whether a library can be imported; a mere folder of its name does not count."""
    spec = find_spec(library)
    return spec is not None and spec.origin is not None


@contextmanager
def optional(library: str, extra: str, key: str) -> Iterator[None]:
    """Turn an ImportError of an optional library into a ConfigError on the key that asks for it.

    The message says which extra of maxpipe installs it, or why an installed one fails.
    """
    try:
        yield
    except ImportError as error:
        # fsspec raises an ImportError of its own from that of the library.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        is_missing = isinstance(cause, ModuleNotFoundError) and (
            f"{cause.name}.".startswith(f"{library}.")
        )
        reason = "is not installed" if is_missing else f"cannot be imported ({cause})"
        message = f"needs {library}, which {reason}: {install_command(extra)}"
        raise ConfigError(Problem(key, message)) from error
