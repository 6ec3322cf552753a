"""How many threads simulated devices get, and whether programs from files may run on them."""

import os

import jax
import pytest

from maxpipe.config import Config, replace
from maxpipe.devices.simulated import (
    explain_threads,
    hindrance,
    hindrance_of,
    start_threads,
    uses_cache,
)

CACHE = replace(Config(), **{"compile.cache_dir": "cache"})
LOAD = replace(Config(), **{"compile.load": "step.bin"})
OUTSIDE = replace(Config(), **{"pipeline.parallel_layers": 6})


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.delenv("NPROC")
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)


class TestStart:
    def test_start_threads_sets_more_threads_only_where_needed(self, monkeypatch):
        for config, devices, processes, threads in (
            (OUTSIDE, 8, 2, "128"),
            (OUTSIDE, 64, 1, "256"),
            (LOAD, 8, 1, "128"),
            (CACHE, 8, 1, "128"),
            (CACHE, 1, 1, None),
            (CACHE, 8, 2, "25"),
            (Config(), 2, 2, "7"),
            (Config(), 1, 4, "4"),
            (Config(), 100, 2, "256"),
            (CACHE, 17, 1, None),
            (Config(), 8, 1, None),
        ):
            monkeypatch.setattr(os, "environ", {})
            start_threads(config, devices, processes)
            assert os.environ.get("NPROC") == threads, (devices, processes)

    def test_start_threads_leaves_the_users_number(self, monkeypatch):
        monkeypatch.setenv("NPROC", "3")
        start_threads(CACHE, 64, 1)
        assert os.environ["NPROC"] == "3"


class TestProgramsFromFiles:
    def test_hindrance_with_too_few_threads_names_the_number(self, monkeypatch):
        for environment, threads in (
            ({}, 2),
            ({"NPROC": "auto"}, 2),
            ({"NPROC": "128", "PJRT_NPROC": "9"}, 9),
        ):
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            reason = f"programs from files need NPROC=128 threads on 8 CPU devices, not {threads}"
            assert hindrance() == reason
            assert not uses_cache(CACHE)
            assert explain_threads(CACHE) == [f"compile.cache_dir=off: {reason}"]

    def test_explain_threads_with_too_few_of_the_users_names_the_number(self, monkeypatch):
        for config, processes in ((Config(), 2), (OUTSIDE, 1), (CACHE, 2)):
            monkeypatch.setenv("NPROC", "6")
            monkeypatch.setattr(jax, "process_count", lambda n=processes: n)
            *_, said = explain_threads(config)
            assert said.startswith("NPROC=6 threads are too few"), (config, processes)
            assert said.endswith("set it to 128" if processes == 1 else "set it to 25")

    def test_hindrance_of_several_processes_and_of_too_many_devices_names_them(self, monkeypatch):
        monkeypatch.setenv("NPROC", "1024")
        assert "several processes" in hindrance_of(8, 2)
        assert "at most 16 CPU devices, not on 64" in hindrance_of(64, 1)

    def test_programs_with_enough_threads_need_a_cache_directory_alone(self, monkeypatch):
        monkeypatch.setenv("NPROC", "128")
        assert hindrance() == ""
        assert uses_cache(CACHE)
        assert explain_threads(CACHE) == []
        assert not uses_cache(Config())
        (said,) = explain_threads(Config())
        assert "name a directory" in said
        assert explain_threads(replace(Config(), **{"compile.cache_dir": "off"})) == []

    def test_hindrance_on_other_devices_is_empty(self, monkeypatch):
        for backend, count in (("cpu", 1), ("tpu", 64)):
            monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
            monkeypatch.setattr(jax, "device_count", lambda n=count: n)
            assert hindrance() == "", (backend, count)
            assert uses_cache(Config()), (backend, count)
            assert explain_threads(Config()) == [], (backend, count)
