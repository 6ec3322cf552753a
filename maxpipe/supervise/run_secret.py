"""Find the secret that the supervisors of a run prove to each other. Imports no JAX."""

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import follow_references, locate, read_files, read_overrides
from maxpipe.config.sections import Config
from maxpipe.config.shipped import locate_config, names_config
from maxpipe.config.values import Scalar
from maxpipe.storage.local_files import cache_directory
from maxpipe.storage.object_store import is_remote

SECRET = "MAXPIPE_SECRET"


def run_secret(command: Sequence[str], count: int) -> str:
    """Return the secret of a run of `count` supervisors.

    It is MAXPIPE_SECRET, which is taken out of the environment. Without that it is in a file that
    only this user may read, in the `output_dir` of the training, which all hosts share. For another
    command it is in `~/.cache/maxpipe`.

    Raises:
      ConfigError: there is no secret, and no place for one that only this user may read.
    """
    secret = os.environ.pop(SECRET, "")
    if secret or count == 1:
        return secret or secrets.token_hex(16)
    try:
        return _secret_in(_output_dir(command) or cache_directory(""))
    except (OSError, RuntimeError) as error:  # the latter without a home directory
        reason = getattr(error, "strerror", None) or error
        message = f"no secret for the supervisors of this run: {reason}; set {SECRET} to the same "
        raise ConfigError(Problem("", f"{message}random text for all of them")) from error


def _secret_in(directory: Path) -> str:
    """Return the secret of this user in a directory, made if there is none."""
    path = directory / f".supervisors-{os.geteuid()}"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        number, scratch = tempfile.mkstemp(prefix=path.name, dir=directory)  # the user's alone
        try:
            with os.fdopen(number, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another supervisor was faster
                os.link(scratch, path)
        finally:
            os.unlink(scratch)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o77:
            raise PermissionError(errno.EPERM, f"others may read {path}, or own it")
        secret = file.read(1000)
    if not secret:
        raise OSError(errno.EINVAL, f"{path} is empty")
    return secret


def _output_dir(command: Sequence[str]) -> Path | None:
    """Return `output_dir` of a command that trains; None if it is another one, or no directory.

    Variants need not be known here, so the configuration is not checked.
    """
    starts = [
        i
        for i, word in enumerate(command, 1)
        if word == "maxpipe.train" or (word == "train" and "maxpipe" in command[i - 2])
    ]
    words = command[starts[0] :] if starts else []
    file = next(filter(names_config, words), None)
    if file is None:
        return None
    settings = read_files(locate_config(file))[0]
    settings += read_overrides([word for word in words if "=" in word])[0]
    chosen = follow_references({setting.key: setting for setting in settings})[0]
    setting = locate(chosen).settings.get("output_dir")
    if setting is None:
        return Path(Config().output_dir)
    if not isinstance(setting.raw, Scalar) or is_remote(setting.raw.text):
        return None  # the trainer refuses it
    return Path(setting.raw.text)
