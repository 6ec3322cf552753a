"""Tables as CSV, also in the forms in which torch.distributed.pipelining dumps its schedules."""

import pytest
from helpers.random_tables import tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.csv_files import csv_sizes, load_csv, to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.schedule import main

# DualPipeV of two ranks and four microbatches, as `_dump_csv(..., "compute_only")` writes it.
DUALPIPE_V = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
,1F0,2F0,1F1,2F1,(1F2;2B0)OVERLAP_F_B,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
"""
# 1F1B of two ranks and two microbatches with transfers, gathers and reductions.
COMPUTE_COMMS = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD,0REDUCE_GRAD
1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RESHARD,1REDUCE_GRAD
"""


def sizes(table):
    return table.num_stages, table.num_microbatches, table.num_repeats


def same_cells(a, b):
    """Return whether the cells are equal, apart from idle columns at the end.

    With few units a file may be read as lockstep or as free-running.
    """
    rows = [[line.rstrip(",") for line in to_csv(table).splitlines()] for table in (a, b)]
    return rows[0] == rows[1]


def without_idle_cells(text):
    return "".join(",".join(filter(None, line.split(","))) + "\n" for line in text.splitlines())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("schedules") / "schedule.csv"


def read(path, text, S, M, V=1, **options):
    path.write_text(text)
    return load_csv(path, S, M, V, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_of_every_schedule_loads_as_the_same_table(name, path):
    for S, M, V in ((1, 1, 1), (2, 3, 1), (4, 6, 2), (3, 2, 3)):
        table = load_schedule(name, S, M, SCHEDULES[name].repeats_for(V))
        path.write_text(to_csv(table))
        again = load_schedule(path, S, M)
        assert again.lockstep == table.lockstep or S == 1
        assert same_cells(again, table)
        assert csv_sizes(path) == sizes(table)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(table=tables(lockstep=False))
def test_csv_of_a_random_table_loads_as_the_same_table(table, path):
    assert same_cells(read(path, to_csv(table), *sizes(table)), table)


@given(table=tables(lockstep=False), data=st.data())
def test_load_csv_without_a_cell_or_with_one_twice_is_refused(table, data, path):
    rows = [line.split(",") for line in to_csv(table).splitlines()]
    cells = [(r, c) for r, row in enumerate(rows) for c, text in enumerate(row) if text]
    if len(cells) <= 2 or table.num_microbatches == 1:
        return
    row, column = data.draw(st.sampled_from(cells))
    if data.draw(st.booleans()):
        rows[row].append(rows[row][column])
    else:
        rows[row][column] = ""
    with pytest.raises(ScheduleError, match=f"stage {row}|wait for ever"):
        read(path, "\n".join(map(",".join, rows)), *sizes(table))


def test_to_csv_writes_global_chunk_kind_microbatch(path):
    assert to_csv(load_schedule("1f1b", 2, 2)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert to_csv(load_schedule("lockstep_1f1b", 2, 1)) == "0F0,,,,,0B0\n,,1F0,1B0,,\n"
    table = load_schedule("lockstep_zb", 2, 1)
    assert to_csv(table) == "0F0,,,,,,,0I0,0W0\n,,,1F0,1I0,,,,1W0\n"
    assert read(path, to_csv(table), 2, 1).lockstep


def test_load_csv_of_a_v_table_recognises_the_placement(path):
    table = read(path, "0F0,,,3F0,3B0,,,0B0\n,1F0,2F0,,,2B0,1B0,\n", 2, 1, 2)
    assert table.placement == "v"
    assert table.stage_of_chunk.tolist() == [0, 1, 1, 0]


def test_load_csv_of_a_file_that_begins_with_a_byte_order_mark_loads_as_without(path):
    """Spreadsheets write one."""
    text = to_csv(load_schedule("1f1b", 2, 2))
    path.write_text(text, encoding="utf-8-sig")
    assert to_csv(load_csv(path, 2, 2, 1)) == text


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "mpmd" in SCHEDULES[name].engines])
def test_load_csv_without_idle_cells_runs_units_as_early_as_their_inputs_allow(name, path):
    repeats = SCHEDULES[name].repeats_for(2)
    for S, M in ((2, 1), (2, 3), (4, 7)):
        table = load_schedule(name, S, M, repeats)
        # In ticks of its own, which a lockstep table such as gpipe's does not have.
        again = read(path, without_idle_cells(to_csv(table)), S, M, repeats)
        assert without_idle_cells(to_csv(again)) == path.read_text()
        assert csv_sizes(path) == (S, M, repeats)
        assert "read as an order of units, not as ticks: it has " in again.note
        if not table.lockstep:
            assert to_csv(again) == to_csv(table)


def test_load_csv_with_overlaps_is_the_forward_and_then_the_backward(path):
    table = read(path, DUALPIPE_V, 2, 4, 2)
    assert (table.placement, table.lockstep) == ("v", False)
    assert without_idle_cells(to_csv(table)).splitlines()[1].startswith("1F0,2F0,1F1,2F1,1F2,2B0")
    own = load_schedule("dualpipe_v", 2, 4, 2)
    assert without_idle_cells(to_csv(table)) == without_idle_cells(to_csv(own))


def test_load_csv_with_transfers_and_gathers_ignores_them_and_says_so_once(path, capsys):
    table = read(path, COMPUTE_COMMS, 2, 2)
    assert to_csv(table) == to_csv(load_schedule("1f1b", 2, 2))
    assert main([str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("read as an order of units, not as ticks: ") == 1
    assert (
        "14 cells (RECV_B, RECV_F, REDUCE_GRAD, RESHARD, SEND_B, SEND_F, UNSHARD)" in captured.err
    )
    assert "2 stages, 2 microbatches, 1 repeat, 6 free-running ticks" in captured.out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,,,0B0\n,1F0,1X0,\n", "row 2, column 3: '1X0' is not a unit"),
        ("0F0,,,,,0B0\n1F0,,,1B0,,\n", "1F0 at tick 0, .* so the earliest possible is tick 1"),
        ("0F0,,,0B0\n,1F0,,\n", "1B0 is missing on stage 1"),
        ("0F0,1F0,,0B0\n,,1B0,\n", r"1F0 \(row 1, column 2\) is on the wrong stage; .* to row 2"),
        (
            "0F0\n",
            "for 1 stages, 1 microbatches and 1 repeats, but mesh.ici.stage=2, pipeline.num_",
        ),
        (",\n,\n", "the file has no units"),
        ("0F0,,,0B0\n,1F0,,70000B60000\n", "last chunk is 70000 .* there are only 4 units"),
        # Orders: stage 0 waits for the circle of the others.
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n", "wait for ever: .*2F1 for 1F1"),
        ("0F0,0B0,0F0\n1F0,1B0\n", "0F0 is twice on stage 0; drop one"),
        ("(0F0;0F1)OVERLAP_F_B\n1F0\n", r"row 1, column 1: '\(0F0;0F1\)OVERLAP_F_B' is not a unit"),
        ("0UNSHARD\n1UNSHARD\n", "the file has no units"),
    ],
)
def test_load_csv_of_a_bad_file_names_the_unit_and_its_place(text, message, path):
    stages = max(text.count("\n"), 2)
    with pytest.raises(ScheduleError, match=message) as error:
        read(path, text, stages, stages - 1)
    assert str(error.value).startswith(f"pipeline.schedule={path}: ")


def test_load_csv_with_a_delay_that_the_file_has_no_room_for_is_refused(path):
    text = to_csv(load_schedule("lockstep_1f1b", 2, 4))
    with pytest.raises(ScheduleError, match="too early"):
        read(path, text, 2, 4, forwarding_delay=2)
    message = "delay_activation_forwarding=true: .* is an order of units without ticks"
    with pytest.raises(ScheduleError, match=message):
        read(path, COMPUTE_COMMS, 2, 2, forwarding_delay=2)


def test_load_csv_of_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match=r"cannot read it: .*No such file or directory"):
        load_csv(tmp_path / "none.csv", 2, 4, 1)
