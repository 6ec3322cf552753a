import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import maxpipe


def command(name: str) -> ModuleType:
    """Return the module that `python -m maxpipe.NAME` runs: a file, or the package's `__main__`."""
    is_package = Path(maxpipe.__file__).with_name(name).is_dir()
    return importlib.import_module(f"maxpipe.{name}" + (".__main__" if is_package else ""))


def exit_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the code that a function, such as a command's `main`, returns or exits with."""
    try:
        return function(*arguments) or 0
    except SystemExit as end:
        return end.code or 0
