import importlib.util
from types import ModuleType


def command(name: str) -> ModuleType:
    """Return the module that `python -m maxpipe.NAME` runs: a file, or the package's `__main__`."""
    is_package = importlib.util.find_spec(f"maxpipe.{name}").submodule_search_locations
    return importlib.import_module(f"maxpipe.{name}" + (".__main__" if is_package else ""))
