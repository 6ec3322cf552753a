"""Find the configurations that ship with maxpipe: by name, as llama3-8b, or as configs/base.yml.

They are in configs/ of a checkout, and in maxpipe/configs/ of an installed wheel.
"""

import difflib
import os
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem

SUFFIXES = (".yml", ".yaml")
_PACKAGE = Path(__file__).parents[1]


def is_checkout() -> bool:
    """Return whether this maxpipe runs from a checkout of its repository."""
    return (_PACKAGE.parent / "configs").is_dir() and not (_PACKAGE / "configs").is_dir()


def config_root() -> Path:
    """Return the directory of the shipped configurations."""
    return _PACKAGE.parent / "configs" if is_checkout() else _PACKAGE / "configs"


def shipped_configs() -> dict[str, Path]:
    """Return the file of every shipped configuration by its name, those at the top first."""
    root = config_root()
    files = [*sorted(root.glob("*.yml")), *sorted(root.glob("*/*.yml"))]
    return {file.stem: file for file in files}


def locate_config(word: str) -> str:
    """Return the path of the YAML file that a word names.

    A file that exists comes first; then `configs/...` and a name without directory and suffix mean
    a shipped configuration, even if there is a directory of that name.

    Raises:
      ConfigError: the word is a name that no configuration has, or a directory.
    """
    if _is_file(word):
        return word
    if shipped := _shipped(word):
        return shipped
    path = Path(word)
    if path.suffix in SUFFIXES:
        return word
    if os.path.isdir(word):
        message = f"{word} is a directory; name a YAML file, such as the config.yml of a run"
        raise ConfigError(Problem("", message))
    if len(path.parts) > 1:
        return word
    configs = shipped_configs()
    near = difflib.get_close_matches(word.lower(), configs, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? the" if near else "the"
    message = f"{word!r} is neither a file nor a preset; {guess} presets are {', '.join(configs)}"
    raise ConfigError(Problem("", message))


def _shipped(word: str) -> str:
    """Return the path of the shipped configuration that a word names; empty if it names none."""
    path = Path(word)
    if path.suffix in SUFFIXES and path.parts[0] == "configs":
        file = config_root().joinpath(*path.parts[1:])
        return shown_path(file) if file.is_file() else ""
    configs = shipped_configs()
    return shown_path(configs[word]) if word in configs else ""


def _is_file(path: str) -> bool:
    return os.path.exists(path) and not os.path.isdir(path)  # a pipe counts as a file


def names_config(word: str) -> bool:
    """Return whether a word of a command line is a YAML file or names a shipped configuration."""
    return word.endswith(SUFFIXES) or word in shipped_configs()


def locate_base(directory: str, text: str) -> str:
    """Return the path that `base: text` means in a file of `directory`, perhaps a shipped one."""
    path = os.path.normpath(os.path.join(directory, os.path.expanduser(text)))
    return path if _is_file(path) else _shipped(text) or path


def shown_path(file: Path) -> str:
    """Return a path relative to the working directory if it is inside."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
