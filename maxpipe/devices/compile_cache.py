"""Switch on JAX's persistent compilation cache, and say where it is."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxpipe.config.sections import Config
from maxpipe.devices.simulated import uses_cache


def start_compile_cache(config: Config) -> None:
    """Use the persistent compilation cache, unless it is off or stored programs cannot run here."""
    cache = compile_cache(config) if uses_cache(config) else None
    if cache is not None and not _is_writable(cache):
        print(f"nothing is cached: {cache} cannot be written (compile.cache_dir)", flush=True)
        cache = None
    # With None JAX stores and finds no programs.
    jax.config.update("jax_compilation_cache_dir", None if cache is None else str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    reset_cache()  # JAX would keep to the directory of an earlier run of this program


def compile_cache(config: Config) -> Path | None:
    """Return the directory of the persistent compilation cache, or None if it is off."""
    if config.compile.cache_dir == "off":
        return None
    return Path(config.compile.cache_dir or Path(config.output_dir) / "compile_cache").absolute()


def _is_writable(directory: Path) -> bool:
    """Return whether files can be made in a directory, which may not exist yet."""
    place = next(path for path in (directory, *directory.parents) if path.exists())
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
