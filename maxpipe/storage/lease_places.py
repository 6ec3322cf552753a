"""Store leases as small files in a directory, or as objects in an object store.

Both create a file or object only if there is none of that name, in one indivisible operation.
Imports no JAX.
"""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from maxpipe.storage.object_store import Deadline

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Entry(NamedTuple):
    """Text of a file or object, and the time of its last change in seconds of the store's clock."""

    text: str
    changed: float


class LeasePlace(Protocol):
    """Where a lease lies: a directory or a place in an object store; `str()` is its path or URL."""

    def read(self, name: str) -> Entry | None:
        """Return a file or object, or None if there is none."""
        ...

    def create(self, name: str, text: str) -> bool:
        """Create a file or object atomically; return false if there is one of that name."""
        ...

    def replace(self, name: str, text: str) -> None:
        """Replace a file or object atomically."""
        ...

    def renew(self, name: str, text: str) -> None:
        """Set the time of the last change of a file or object that holds `text`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file or object; do nothing if there is none."""
        ...

    def is_gone(self) -> bool:
        """Return whether the place itself was deleted or moved since it was first used."""
        ...


class LeaseDirectory:
    """A `LeasePlace` in a file system.

    Args:
      path: the directory; made by the first `create`.
    """

    def __init__(self, path: Path):
        self._path = Path(path).absolute()
        self._shown = str(path)
        self._identity: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self._shown

    def read(self, name: str) -> Entry | None:
        try:
            # Opening a file makes NFS ask the server, which a stat alone need not do. A pipe is
            # opened without waiting for a writer.
            number = os.open(self._path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return self._read_link(name)
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            # Pipes and devices may never end; like a torn file, they name no owner.
            text = file.read() if stat.S_ISREG(status.st_mode) else b""
            return Entry(text.decode(errors="replace"), status.st_mtime)

    def create(self, name: str, text: str) -> bool:
        self._path.mkdir(parents=True, exist_ok=True)
        self._identity = self._identity or self._look()
        scratch = self._scratch(name, text)
        try:
            os.link(scratch, self._path / name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create_without_links(name, text)
        finally:
            scratch.unlink(missing_ok=True)
        return True

    def replace(self, name: str, text: str) -> None:
        self._scratch(name, text).replace(self._path / name)

    def renew(self, name: str, text: str) -> None:
        os.utime(self._path / name)  # needs no room on a full disk

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._path / name).unlink()

    def is_gone(self) -> bool:
        return self._look() != self._identity

    def _read_link(self, name: str) -> Entry | None:
        """Return a dangling link's entry: it names no owner, but `create` fails because of it."""
        try:
            return Entry("", (self._path / name).lstat().st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino

    def _scratch(self, name: str, text: str) -> Path:
        scratch = self._path / f".{name}.{secrets.token_hex(8)}"
        scratch.write_text(text, encoding="utf-8")
        return scratch

    def _create_without_links(self, name: str, text: str) -> bool:
        try:
            with (self._path / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True


class LeaseObjects:
    """A `LeasePlace` in an object store with conditional writes; its methods raise its errors.

    Args:
      url: URL of the place, such as `s3://bucket/runs/base`.
      store: the fsspec file system that the URL belongs to.
      deadline: limit on how long the store may be silent.
    """

    def __init__(self, url: str, store: "AbstractFileSystem", deadline: Deadline):
        self._url = url.rstrip("/")
        self._store = store
        self._deadline = deadline

    def __str__(self) -> str:
        return self._url

    def read(self, name: str) -> Entry | None:
        path = f"{self._url}/{name}"
        try:
            content = self._deadline.wait(lambda: self._store.cat_file(path))
            modified = self._deadline.wait(lambda: self._store.modified(path))
            return Entry(content.decode(errors="replace"), modified.timestamp())
        except FileNotFoundError:
            return None

    def create(self, name: str, text: str) -> bool:
        # Some stores ignore the condition of the write.
        if self._deadline.wait(lambda: self._store.exists(f"{self._url}/{name}")):
            return False
        try:
            self._write(name, text, mode="create")
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, text: str) -> None:
        self._write(name, text)

    def renew(self, name: str, text: str) -> None:
        self.replace(name, text)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._deadline.wait(lambda: self._store.rm_file(f"{self._url}/{name}"))

    def is_gone(self) -> bool:
        return False  # an object store has no directories

    def _write(self, name: str, text: str, mode: str = "overwrite") -> None:
        path = f"{self._url}/{name}"
        self._deadline.wait(lambda: self._store.pipe_file(path, text.encode(), mode=mode))
