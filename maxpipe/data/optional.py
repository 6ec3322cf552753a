"""Libraries that only some data needs."""

from collections.abc import Iterator
from contextlib import contextmanager

from maxpipe.config.errors import ConfigError, Problem


@contextmanager
def optional(library: str, extra: str, key: str) -> Iterator[None]:
    """Says how to install a library whose import fails inside.

    Args:
      library: its name.
      extra: the extra of maxpipe that installs it.
      key: what asked for it, such as `data.source`.

    Raises:
      ConfigError: instead of ImportError.
    """
    try:
        yield
    except ImportError as error:
        message = f"needs {library}, which is not installed: pip install 'maxpipe[{extra}]'"
        raise ConfigError(Problem(key, message)) from error
