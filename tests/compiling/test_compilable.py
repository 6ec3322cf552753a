"""--compile and --probe are refused where there is nothing to compile with."""

import argparse

import pytest

from maxpipe.compiling import compilable
from maxpipe.compiling.compilable import FINALISTS, compiler_problems, number_compiled
from maxpipe.config import Config
from maxpipe.planning.search.machine import machine_of


def problems_of(topology, **given):
    flags = argparse.Namespace(**{"compile": None, "probe": 0, "closed": False} | given)
    return [str(p) for p in compiler_problems(flags, machine_of(topology, 1, Config()))]


@pytest.fixture(autouse=True)
def libtpu(monkeypatch):
    monkeypatch.setattr(compilable, "is_installed", lambda name: True)


@pytest.mark.parametrize("topology", ["cpu:4", "H100:4"])
def test_what_nothing_compiles_for_is_refused_where_it_is_asked_for(topology):
    assert problems_of(topology) == []
    assert problems_of(topology, compile=0) == []
    missing = f"there is no compiler at hand for {topology}; leave it out"
    assert problems_of(topology, compile=2, probe=2) == [
        f"--compile: {missing}",
        f"--probe: {missing}",
    ]


def test_probes_need_a_chip_whose_clock_is_known():
    assert problems_of("v5p:2x2x1", probe=2) == []
    (problem,) = problems_of("tpu7x:2x2x1", probe=2)
    assert "since the clock of tpu7x is" in problem


def test_libtpu_is_asked_for_where_something_is_compiled(monkeypatch):
    monkeypatch.setattr(compilable, "is_installed", lambda name: False)
    (problem,) = problems_of("v5p:2x2x1")
    assert problem.startswith("--compile: needs libtpu: pip install ")
    assert "--no-compile" in problem
    assert problems_of("v5p:2x2x1", closed=True) == problems_of("cpu:4") == []


def test_three_are_compiled_by_default():
    flags = argparse.Namespace(compile=None, closed=False)
    assert number_compiled(flags) == FINALISTS == 3
    assert number_compiled(argparse.Namespace(compile=None, closed=True)) == 0
    assert number_compiled(argparse.Namespace(compile=5, closed=False)) == 5
