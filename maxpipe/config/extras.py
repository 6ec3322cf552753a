"""Libraries that only some runs need."""

from collections.abc import Iterator
from contextlib import contextmanager

from maxpipe.config.errors import ConfigError, Problem


@contextmanager
def optional(library: str, extra: str, key: str) -> Iterator[None]:
    """Says how to install a library whose import fails inside, or why an installed one cannot be imported.

    Args:
      library: its name, in an import.
      extra: the extra of maxpipe that installs it.
      key: what asked for it, such as `data.source`.

    Raises:
      ConfigError: instead of ImportError.
    """
    try:
        yield
    except ImportError as error:
        # fsspec hides the error of the library it imports behind one of its own.
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        missing = (
            isinstance(cause, ModuleNotFoundError)
            and (cause.name or "").partition(".")[0] == library
        )
        why = "is not installed" if missing else f"cannot be imported ({cause})"
        message = f"needs {library}, which {why}: pip install 'maxpipe[{extra}]'"
        raise ConfigError(Problem(key, message)) from error
