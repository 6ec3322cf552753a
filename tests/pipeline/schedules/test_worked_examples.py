"""The examples in docstrings of schedules, compared with the tables that the code builds."""

import doctest
import re
import textwrap

import pytest

from maxpipe.config.catalog import SCHEDULES
from maxpipe.config.imports import implementation
from maxpipe.pipeline.schedules import lockstep, order, slots, table
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import Unit

EXAMPLE = re.compile(
    r"S=(\d+), M=(\d+)(?:, V=(\d+))?.*?\n\n((?: +(?:tick|stage \d) .*\n)+)", re.DOTALL
)


def table_text(table):
    cells = [[""] * table.num_ticks for _ in range(table.num_stages)]
    for kind in table.kinds:
        for tick, stage, microbatch, chunk in zip(*table.units(kind), strict=True):
            unit = Unit(kind, microbatch, table.global_chunk(chunk, stage))
            text = str(unit) if table.num_repeats > 1 else f"{kind}{microbatch}"
            cells[stage][tick] += ("+" if cells[stage][tick] else "") + text
    rows = [["tick", *map(str, range(table.num_ticks))]]
    rows += [[f"stage {stage}", *row] for stage, row in enumerate(cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_docstring_of_every_schedule_shows_its_table(name):
    match = EXAMPLE.search(implementation(SCHEDULES[name]).__doc__)
    assert match, f"the docstring of {name} has no example that begins with S=, M="
    stages, microbatches, repeats = (int(size or 1) for size in match.groups()[:3])
    text = textwrap.dedent(match[4]).rstrip()
    assert text == table_text(load_schedule(name, stages, microbatches, repeats))


def test_docstrings_of_modules_show_a_table():
    smallest = table_text(load_schedule("lockstep_1f1b", 2, 3))
    interleaved = table_text(load_schedule("interleaved_1f1b", 2, 2, 2))
    for module, text in ((table, interleaved), (lockstep, smallest), (slots, smallest)):
        assert textwrap.indent(text, "    ") in module.__doc__


def test_docstring_of_table_shows_its_arrays():
    example = load_schedule("interleaved_1f1b", 2, 2, 2)
    assert example.microbatch["F"][:3].tolist() == [[0, -1], [1, 0], [0, 1]]
    assert example.chunk["F"][:3].tolist() == [[0, -1], [0, 0], [1, 0]]


def test_docstring_of_slots_names_lifetimes_and_sizes():
    stores = activation_slots(load_schedule("lockstep_1f1b", 2, 3, 1))
    for store, lifetimes in (
        (stores.residuals, [[0, 2], [1, 3], [2, 4]]),
        (stores.gradients, [[2, 2], [3, 3], [4, 4]]),
    ):
        on_first = store.stage == 0
        pairs = zip(store.first[on_first], store.last[on_first], strict=True)
        assert [list(pair) for pair in pairs] == lifetimes
    assert (stores.residuals.size, stores.gradients.size) == (3, 1)


def test_doctests_of_order_pass():
    results = doctest.testmod(order)
    assert results.attempted > 0
    assert results.failed == 0
