"""Give a run a small file system of its own, which can be filled and frozen from outside."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
_UNMOUNT_SECONDS = 20.0
_BALLAST = "ballast"


class SmallDisk:
    """An ext4 file system in a file, mounted over a loop device; a context manager. Linux, as root.

    Args:
      place: a new directory, at which it is mounted.
      megabytes: its size.

    Raises:
      OSError: it cannot be made or mounted here.
    """

    def __init__(self, place: Path, megabytes: int = 128):
        self.place = place
        self._image = place.with_suffix(".ext4")
        self._megabytes = megabytes

    def __enter__(self) -> Self:
        self.place.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(self._megabytes << 20)
        _command("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        _command("mount", "-o", "loop,noatime", str(self._image), str(self.place))
        return self

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + _UNMOUNT_SECONDS
        while True:  # what still writes to it has just been killed
            try:
                _command("umount", str(self.place))
                break
            except OSError:
                if time.monotonic() > until:
                    _command("umount", "-l", str(self.place))  # when it is not busy any more
                    break
                time.sleep(0.5)
        self._image.unlink()
        self.place.rmdir()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leave no room within the context."""
        ballast = self.place / _BALLAST
        try:
            with ballast.open("wb") as file:
                size, piece = 0, self._megabytes << 20
                while piece >= 512:
                    try:
                        os.posix_fallocate(file.fileno(), size, piece)
                        size += piece
                    except OSError:
                        piece //= 2
            yield
        finally:
            ballast.unlink()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let all writes wait within the context, as those to a disk or server that stalls."""
        directory = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _FREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(directory, _THAW, 0)
        finally:
            os.close(directory)


def why_no_disk(directory: Path) -> str:
    """Return why no small disk can be mounted below a directory, "" if one can."""
    try:
        with (
            tempfile.TemporaryDirectory(dir=directory) as trial,
            SmallDisk(Path(trial) / "disk", megabytes=8) as disk,
            disk.frozen(),
        ):
            return ""
    except OSError as error:
        return str(error)


def _command(*words: str) -> None:
    """Run a command; raise OSError with what it printed if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{words[0]}: {done.stderr.strip()}")
