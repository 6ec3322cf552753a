"""Check and write the files that flags and keys name."""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem


def unwritable(file: str, *, is_replaced: bool = False) -> str:
    """Return why a file cannot be written; empty if it can.

    If a new file replaces it, it must not be a device (/dev/stdout).
    """
    if file == "-":
        return "a dash is no file; /dev/stdout is standard output"
    if file.endswith("/"):
        return "it is a directory; name a file in it"
    path = Path(file)
    try:
        exists, has_directory = path.exists(), path.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        return error.strerror or str(error)
    if not has_directory:
        return f"there is no directory {path.parent}"
    if exists and not path.is_file() and (is_replaced or path.is_dir()):
        return "it is no regular file"
    touched = path.parent if is_replaced or not exists else path
    return "" if os.access(touched, os.W_OK) else f"no permission to write to {touched}"


def output_problems(
    files: Mapping[str, str | None], read: Collection[str] = (), replaced: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield why files cannot be written, or would replace each other or what is read.

    Args:
      files: paths by the flag or key that names them; None or empty for no file.
      read: paths of files that are read, which must stay.
      replaced: flags and keys whose file is replaced by a new one, see `unwritable`.
    """
    taken = {os.path.realpath(file): "is read" for file in read}
    for flag, file in files.items():
        if not file:
            continue
        place = os.path.realpath(file)
        if reason := unwritable(file, is_replaced=flag in replaced):
            yield Problem(flag, f"cannot write {file}: {reason}")
        elif place in taken and not is_device(file):
            yield Problem(flag, f"would replace {file}, which {taken[place]}; name another file")
        taken.setdefault(place, f"{flag} writes")


def check_new(flag: str, file: str | Path) -> None:
    """Raise ConfigError if the file that a flag names, and that runs may need, exists."""
    if Path(file).exists() and not is_device(str(file)):
        message = f"{file} exists, and a run may need it: choose another place, or delete it"
        raise ConfigError(Problem(flag, message))


def check_local(flag: str, place: str) -> None:
    """Raise ConfigError if a flag names a URL, which would make a directory called `gs:`."""
    if "://" in place:
        message = f"{place} is a URL; write to a path of this machine, and copy what is there"
        raise ConfigError(Problem(flag, message))


def is_device(file: str) -> bool:
    """Return whether a file takes what it is given without keeping it, such as /dev/stdout."""
    return Path(file).exists() and not Path(file).is_file()


def write_file(flag: str, file: str, content: str | bytes) -> None:
    """Write the file that a flag names; raises ConfigError if it cannot be written."""
    try:
        Path(file).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigError(Problem(flag, f"cannot write {file}: {error.strerror}")) from None
