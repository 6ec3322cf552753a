"""Runs JAX on eight simulated CPU devices, with one compilation cache for all test runs of a user."""

import os
import stat
import tempfile
from importlib.metadata import version
from pathlib import Path


def _compilation_cache():
    """A directory that this user alone can write to: programs are loaded from it and run."""
    path = Path(tempfile.gettempdir()) / f"maxpipe-tests-{os.getuid()}-jax{version('jax')}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    safe = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return path if safe else Path(tempfile.mkdtemp(prefix="maxpipe-tests-"))


# Before JAX is imported, and by environment variables, so that processes started by tests do the same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_compilation_cache()))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
