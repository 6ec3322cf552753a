"""Libraries that only some data needs."""

import importlib
from typing import Any

from maxpipe.config.errors import ConfigError, Problem


def require(module: str, extra: str, key: str) -> Any:
    """Imports a library.

    Args:
      module: to import.
      extra: the extra of maxpipe that installs it.
      key: what asked for it, such as `data.source`.

    Raises:
      ConfigError: it is not installed; says how to.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"needs {module.partition('.')[0]}, which is not installed: pip install 'maxpipe[{extra}]'"
        raise ConfigError(Problem(key, message)) from error
