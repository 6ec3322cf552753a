"""Run what a command line of `maxpipe.plan` asks for, and print and write the result."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

import jax

from maxpipe.compile.checks import check_libtpu
from maxpipe.compile.finalists import prove
from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.config.imports import import_words
from maxpipe.config.outputs import write_file
from maxpipe.config.terminal import folded, terminal_width
from maxpipe.plan.search.best import Plan, make_plan, smallest_plans
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.remedies import remedies
from maxpipe.plan.search.request import TOPOLOGY, Request
from maxpipe.plan.search.written import file_text
from maxpipe.render.plan_page import page_html
from maxpipe.render.plan_text import (
    as_json,
    basis_lines,
    nothing_fits_lines,
    slice_lines,
    summary_lines,
    table_lines,
)

FITS, NOTHING_FITS = 0, 3


def launch(request: Request, flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Plan, prove, print and write; return the exit code.

    `words` are the command line after the command, for the file that is written.
    """
    # The host's own accelerator is not needed, and may be in use.
    jax.config.update("jax_platforms", "cpu")
    if flags.compile and request.machine.is_compilable:
        try:
            check_libtpu()
        except ConfigError as error:
            _print(f"{error}; the plan is by closed forms")
            flags.compile = 0
    facts = Facts(request.config)
    if request.smallest:
        plan = _smallest(request, flags, facts)
    else:
        plan = _proved(make_plan(request, facts, compare=flags.compare), flags)
    if plan.winner is None:
        plan = replace(plan, remedies=remedies(plan, facts, _print))
    _print(*basis_lines(plan))
    print(*table_lines(plan, terminal_width(sys.stdout)), sep="\n", flush=True)
    if plan.winner is None:
        _print(*nothing_fits_lines(plan))
    if flags.json:
        write_file("--json", flags.json, json.dumps(as_json(plan), indent=1) + "\n")
    if flags.html:
        write_file("--html", flags.html, redacted(page_html(plan, words)))
    if plan.winner is None:
        if flags.write:
            print(f"not written {flags.write}: nothing fits")
        return NOTHING_FITS
    if flags.write:
        write_file("--write", flags.write, file_text(plan, plan.winner, words))
        train = ["python", "-m", "maxpipe.train", flags.write, *import_words(request.imports)]
        print(f"written     {flags.write}: {shlex.join(train)}")
    return FITS


def _smallest(request: Request, flags: argparse.Namespace, facts: Facts) -> Plan:
    """Return the proved plan of the smallest slice that trains the model, or that of the last."""
    plans = smallest_plans(request, facts, _print)
    costs = [plan.cost() for plan in plans if plan.winner is not None]
    if costs:
        print("by closed forms:", *slice_lines(costs), "", sep="\n", flush=True)
    *smaller, last = (replace(plan, slices=costs) for plan in plans)
    for plan in smaller:
        proved = _proved(plan, flags)
        if proved.winner is not None:
            return proved
        topology = proved.request.machine.topology
        print(f"nothing that was compiled fits {topology}: the next slice\n", flush=True)
    return _proved(last, flags)


def _proved(plan: Plan, flags: argparse.Namespace) -> Plan:
    """Return the plan with its best rows compiled; print what was searched."""
    _print(*summary_lines(plan))
    if plan.outcome.least is None:
        raise ConfigError(_nothing_legal(plan))
    if flags.compile and plan.request.machine.is_compilable and plan.rows:
        plan = prove(plan, flags.compile, _print)
    return plan


def _nothing_legal(plan: Plan) -> Problem:
    """Return why most candidates were left out where none is legal, and what to change."""
    request, place = plan.request, f"{plan.request.machine.devices} devices"
    values, remedy = [], f"give {TOPOLOGY} another number of them"
    for key, chosen in request.choices.items():
        flag = "--fix" if key in request.fixed else "--try"
        values.append(f"{flag} {key}={','.join(map(str, chosen))}")
        remedy = "give other values, or leave some out"
    given = " on ".join([" ".join(values), place] if values else [place])
    if not plan.outcome.fallen:
        return Problem("", f"{given}: no mesh, engine and schedule has these values; {remedy}")
    ((reason, _),) = plan.outcome.fallen.most_common(1)
    return Problem("", f"{given}: nothing is legal; most are left out for: {reason}; {remedy}")


def _print(*lines: str) -> None:
    for line in lines:
        print(folded(line, terminal_width(sys.stdout)), flush=True)
