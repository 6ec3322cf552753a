"""Switch on JAX's persistent compilation cache, say where it is, and remove damaged entries."""

import glob
import os
import re
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxpipe.config.sections import Config
from maxpipe.config.terminal import emit
from maxpipe.devices.simulated import uses_cache

# JAX's warning, after which it goes on to compile.
_NOT_READ = "Error reading persistent compilation cache entry for '(.+?)': (.*)"
_SUFFIX = "-cache"  # end of the names of entries, which begin with their program's name
_ZSTD = b"\x28\xb5\x2f\xfd"  # first bytes of data that zstandard has packed


def start_compile_cache(config: Config) -> None:
    """Use the persistent compilation cache, unless it is off or stored programs cannot run here."""
    cache = compile_cache(config)
    if cache is None or not uses_cache(config):
        _use(None)
        return
    if not _is_writable(cache):
        print(f"nothing is cached: {cache} cannot be written (compile.cache_dir)", flush=True)
        _use(None)
        return
    _use(str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    warnings.filterwarnings("always", message=_NOT_READ.partition("'")[0])
    show = warnings.showwarning
    if isinstance(show, _Mender):  # of an earlier run of this program
        show = show.show
    warnings.showwarning = _Mender(cache, show)


def compile_cache(config: Config) -> Path | None:
    """Return the directory of the persistent compilation cache, or None if it is off."""
    if config.compile.cache_dir == "off":
        return None
    return Path(config.compile.cache_dir or Path(config.output_dir) / "compile_cache").absolute()


def remove_damaged(cache: Path, program: str) -> int:
    """Remove the entries of a program that cannot be unpacked; return their number.

    JAX never replaces an entry, so it would come upon a damaged one at every start.
    """
    removed = 0
    for entry in cache.glob(f"{glob.escape(program)}*{_SUFFIX}"):
        with suppress(OSError):  # cannot be read or removed, or another process was faster
            if entry.is_file() and not _can_be_unpacked(entry.read_bytes()):
                entry.unlink()
                removed += 1
    return removed


def _use(directory: str | None) -> None:
    """Let JAX store programs in a directory from now on; with None, store and find none."""
    jax.config.update("jax_compilation_cache_dir", directory)
    reset_cache()  # JAX would keep to the directory of an earlier run of this program


class _Mender:
    """Shows warnings; says in a line of our own that an entry cannot be read, and makes room.

    Args:
      cache: directory of the cache.
      show: function that shows other warnings.
    """

    def __init__(self, cache: Path, show: Callable[..., None]):
        self.cache, self.show = cache, show

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        not_read = re.match(_NOT_READ, str(message), re.DOTALL)
        if not_read is None:
            self.show(message, category, filename, lineno, file, line)
            return
        program, reason = not_read.groups()
        is_removed = remove_damaged(self.cache, program)
        what = "was damaged and is removed" if is_removed else "cannot be used"
        emit(f"an entry of {self.cache} {what}: {program} is compiled anew ({reason})")


def _can_be_unpacked(content: bytes) -> bool:
    unpack: Callable[[bytes], object] = zlib.decompress
    if content.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            return True  # another environment has written it, and only that can tell
        unpack = zstandard.ZstdDecompressor().decompress
    try:
        unpack(content)
    except Exception:  # each library has errors of its own
        return False
    return True


def _is_writable(directory: Path) -> bool:
    """Return whether files can be made in a directory, which may not exist yet."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
