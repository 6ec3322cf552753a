"""Load configurations in Python. Imports no JAX."""

from os import PathLike, fspath

from maxpipe.config.imports import import_variants
from maxpipe.config.load import load
from maxpipe.config.sections import Config


def load_config(config: str | PathLike[str], *overrides: str) -> Config:
    """Load a configuration as `python -m maxpipe.train` does, and check all of it.

    Variants of installed packages are found; import a module with variants of your own before the
    call.

    Args:
      config: path of a YAML file, or the name of one that ships with maxpipe, such as "base" or
        "llama3-8b".
      *overrides: `key=value` words, such as "model.num_layers=8"; the last one for a key counts.

    Returns:
      The frozen configuration; its keys are attributes, such as `config.model.num_layers`.
      `maxpipe.config.replace` returns a copy with some of them changed.

    Raises:
      ConfigError: a ValueError that lists all problems, one per line.
    """
    import_variants(())
    return load(fspath(config), overrides).config
