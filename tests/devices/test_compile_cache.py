"""The persistent compilation cache: its directory, and when there is none."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from maxpipe.config import Config, replace
from maxpipe.devices.compile_cache import compile_cache, start_compile_cache


def test_compile_cache_is_in_the_output_directory_by_default(tmp_path):
    config = replace(Config(), output_dir=str(tmp_path))
    assert compile_cache(config) == tmp_path / "compile_cache"
    assert compile_cache(replace(config, **{"compile.cache_dir": "off"})) is None
    assert (
        compile_cache(replace(config, **{"compile.cache_dir": "/elsewhere"})).as_posix()
        == "/elsewhere"
    )


class TestCompileCache:
    @pytest.fixture(autouse=True)
    def _settings(self):
        names = (
            "enable_compilation_cache",
            "compilation_cache_dir",
            "persistent_cache_min_compile_time_secs",
        )
        before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
        yield
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    def test_start_compile_cache_on_several_cpu_devices_needs_a_directory(
        self, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("NPROC", "128")
        jax.config.update("jax_enable_compilation_cache", True)
        start_compile_cache(replace(Config(), **{"compile.cache_dir": str(tmp_path)}))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        start_compile_cache(Config())
        assert jax.config.jax_compilation_cache_dir is None

    def test_start_compile_cache_on_other_devices_is_used(self, monkeypatch, tmp_path):
        for backend, count in (("cpu", 1), ("tpu", 4)):
            monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
            monkeypatch.setattr(jax, "device_count", lambda n=count: n)
            jax.config.update("jax_enable_compilation_cache", True)
            start_compile_cache(replace(Config(), output_dir=str(tmp_path)))
            assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compile_cache")

    def test_start_compile_cache_that_cannot_be_written_is_off_and_said_once(
        self, monkeypatch, tmp_path, capsys
    ):
        """JAX itself would warn of every program."""
        monkeypatch.setenv("NPROC", "128")
        (tmp_path / "file").touch()
        jax.config.update("jax_enable_compilation_cache", True)
        for cache in (tmp_path / "file", tmp_path / "file/cache"):
            start_compile_cache(replace(Config(), **{"compile.cache_dir": str(cache)}))
            assert jax.config.jax_compilation_cache_dir is None
            said = f"nothing is cached: {cache} cannot be written (compile.cache_dir)\n"
            assert capsys.readouterr().out == said

    def test_each_run_of_a_program_has_the_cache_of_its_own_configuration(
        self, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("NPROC", "128")
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
        for number, place in enumerate(("off", "a", "b", "off", "a")):
            cache = place if place == "off" else str(tmp_path / place)
            start_compile_cache(replace(Config(), **{"compile.cache_dir": cache}))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.jit(lambda x, n=number: n * x + 1).lower(jnp.ones(3)).compile()
        stored = {place: [*(tmp_path / place).glob("jit__lambda*-cache")] for place in "ab"}
        assert {place: len(entries) for place, entries in stored.items()} == {"a": 2, "b": 1}
