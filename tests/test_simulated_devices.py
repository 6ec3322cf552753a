"""How many threads simulated devices get, and whether programs from files are safe with them."""

import os

import jax
import pytest

from maxpipe.config import Config, replace
from maxpipe.simulated_devices import explain_threads, runs_stored_programs, start_threads

CACHE = {"compile.cache_dir": "cache"}


@pytest.mark.parametrize("values", [{"pipeline.parallel_layers": 6}, {"compile.load": "step.bin"}, CACHE])
def test_many_threads_where_collectives_are_out_of_order(values, monkeypatch):
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    start_threads(replace(Config(), **values), 1)
    assert "NPROC" not in os.environ
    start_threads(replace(Config(), **values), 8)
    assert os.environ.pop("NPROC") == "128"


@pytest.mark.parametrize("cache", ["", "off"])
def test_otherwise_as_many_as_xla_takes(cache, monkeypatch):
    monkeypatch.delenv("NPROC")
    start_threads(replace(Config(), **{"compile.cache_dir": cache}), 64)
    assert "NPROC" not in os.environ


def test_the_users_number_stays(monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    start_threads(replace(Config(), **CACHE), 64)
    assert os.environ["NPROC"] == "3"


@pytest.mark.parametrize(("threads", "processes", "safe"), [(128, 1, True), (127, 1, False), (128, 2, False)])
def test_programs_from_files_need_threads_and_one_process(threads, processes, safe, monkeypatch):
    monkeypatch.setenv("NPROC", str(threads))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    assert runs_stored_programs() == safe
    (said,) = explain_threads(replace(Config(), **CACHE))
    assert ("128 threads" if safe else "compile.cache_dir=off: ") in said
    assert explain_threads(Config()) == []
