"""--compile is refused where there is nothing to compile with."""

import argparse

from maxpipe.compile import compilable
from maxpipe.compile.compilable import FINALISTS, compiler_problems, number_compiled
from maxpipe.config import Config
from maxpipe.plan.search.machine import machine_of


def test_what_nothing_compiles_for_is_refused_where_it_is_asked_for(monkeypatch):
    def problems_of(topology, **given):
        flags = argparse.Namespace(**{"compile": None, "closed": False} | given)
        return [str(p) for p in compiler_problems(flags, machine_of(topology, 1, Config()))]

    monkeypatch.setattr(compilable, "is_installed", lambda name: True)
    for topology in ("cpu:4", "H100:4"):
        assert problems_of(topology) == problems_of(topology, compile=0) == []
        (problem,) = problems_of(topology, compile=2)
        assert problem == f"--compile: there is no compiler at hand for {topology}; leave it out"
    monkeypatch.setattr(compilable, "is_installed", lambda name: False)
    (problem,) = problems_of("v5p:2x2x1")
    assert problem.startswith("--compile: needs libtpu: pip install ")
    assert problems_of("v5p:2x2x1", closed=True) == problems_of("cpu:4") == []


def test_three_are_compiled_by_default():
    numbers = {(None, False): 3, (None, True): 0, (5, False): 5}
    assert FINALISTS == 3
    for (given, closed), number in numbers.items():
        assert number_compiled(argparse.Namespace(compile=given, closed=closed)) == number
