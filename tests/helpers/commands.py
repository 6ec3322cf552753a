import importlib
from pathlib import Path
from types import ModuleType

import maxpipe


def command(name: str) -> ModuleType:
    """Return the module that `python -m maxpipe.NAME` runs: a file, or the package's `__main__`."""
    is_package = Path(maxpipe.__file__).with_name(name).is_dir()
    return importlib.import_module(f"maxpipe.{name}" + (".__main__" if is_package else ""))
