import pytest
from helpers.random_tables import tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.csv_files import csv_sizes, load_csv, to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import ScheduleError


def sizes(table):
    return table.num_stages, table.num_microbatches, table.num_repeats


def same_cells(a, b):
    """Return whether the cells are equal, apart from idle columns at the end.

    With few units a file may be read as lockstep or as free-running.
    """
    rows = [[line.rstrip(",") for line in to_csv(table).splitlines()] for table in (a, b)]
    return rows[0] == rows[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("schedules") / "schedule.csv"


def read(path, text, S, M, V=1, **options):
    path.write_text(text)
    return load_csv(path, S, M, V, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_of_every_schedule_loads_as_the_same_table(name, path):
    schedule = SCHEDULES[name]
    for S, M, V in ((1, 1, 1), (2, 3, 1), (4, 6, 2), (3, 2, 3)):
        table = load_schedule(name, S, M, schedule.repeats_for(V))
        again = read(path, to_csv(table), *sizes(table))
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
    with pytest.raises(ScheduleError, match=f"row {row + 1}"):
        read(path, "\n".join(map(",".join, rows)), *sizes(table))


def test_to_csv_writes_global_chunk_kind_microbatch(path):
    assert to_csv(load_schedule("1f1b", 2, 2)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert to_csv(load_schedule("lockstep_1f1b", 2, 1)) == "0F0,,,,,0B0\n,,1F0,1B0,,\n"


def test_to_csv_of_a_lockstep_table_with_w_has_three_columns_per_tick(path):
    table = load_schedule("lockstep_zb", 2, 1)
    assert to_csv(table) == "0F0,,,,,,,0I0,0W0\n,,,1F0,1I0,,,,1W0\n"
    assert read(path, to_csv(table), 2, 1).lockstep
    with pytest.raises(
        ScheduleError,
        match=r"1W0 \(row 2, column 3\) is too early.*so the earliest possible is column 6",
    ):
        read(path, "0F0,,,,,,,0I0,0W0\n,,1W0,1F0,1I0,,,,\n", 2, 1)


def test_load_csv_of_a_v_table_recognises_the_placement(path):
    table = read(path, "0F0,,,3F0,3B0,,,0B0\n,1F0,2F0,,,2B0,1B0,\n", 2, 1, 2)
    assert table.placement == "v"
    assert table.stage_of_chunk.tolist() == [0, 1, 1, 0]


def test_load_csv_of_a_file_that_begins_with_a_byte_order_mark_loads_as_without(path):
    """Spreadsheets write one."""
    text = to_csv(load_schedule("1f1b", 2, 2))
    path.write_text(text, encoding="utf-8-sig")
    assert to_csv(load_csv(path, 2, 2, 1)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,,,0B0\n,1F0,1X0,\n", "row 2, column 3: '1X0' is not a unit"),
        (
            "0F0,,0B0\n,1F0,1B0\n",
            r"0B0 \(row 1, column 3\) is too early: it needs 1B0 \(row 2, column 3\), so the "
            "earliest possible is column 4",
        ),
        ("0F0,,,0B0\n,1F0,,\n", "1B0 is missing on row 2"),
        (",,,0B0\n,1F0,1B0,\n", "0F0 is missing on row 1"),
        (
            "0F0,0F0,,,0B0\n,1F0,1B0,\n",
            r"0F0 \(row 1, column 2\) is doubled: it runs already as 0F0 \(row 1, column 1\)",
        ),
        (
            "0F0,1F0,,0B0\n,,1B0,\n",
            r"1F0 \(row 1, column 2\) is on the wrong stage; chunk 1 belongs to row 2",
        ),
        ("0F0,\n,1F0\n", "1B0 is missing on row 2|0B0 is missing on row 1"),
        (
            "0F0\n",
            "the file is for 1 stages, 1 microbatches and 1 repeats, but mesh.ici.stage=2, "
            "pipeline.num_microbatches=1 and pipeline.num_repeats=1",
        ),
        (",\n,\n", "the file has no units"),
        (
            "0F0,,,0B0\n,1F0,,70000B60000\n",
            "70000B60000 .*are the last chunk and the last microbatch, but there are only 4 units",
        ),
    ],
)
def test_load_csv_of_a_bad_file_names_row_column_and_cell(text, message, path):
    with pytest.raises(ScheduleError, match=message) as error:
        read(path, text, 2, 1)
    assert str(error.value).startswith(f"pipeline.schedule={path}: ")


def test_load_csv_of_a_bad_lockstep_file_counts_columns_in_the_file(path):
    with pytest.raises(
        ScheduleError,
        match=r"1F0 \(row 2, column 1\) is too early.*so the earliest possible is column 3",
    ):
        read(path, "0F0,,,,,0B0\n1F0,,,1B0,,\n", 2, 1)


def test_load_csv_with_a_delay_that_the_file_has_no_room_for_is_refused(path):
    text = to_csv(load_schedule("lockstep_1f1b", 2, 4))
    with pytest.raises(ScheduleError, match="too early"):
        read(path, text, 2, 4, forwarding_delay=2)


def test_load_csv_of_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match="cannot read it: No such file or directory"):
        load_csv(tmp_path / "none.csv", 2, 4, 1)


def test_load_schedule_by_name_or_by_file_is_the_same_table(path):
    table = load_schedule("lockstep_1f1b", 2, 4, 2, slack=1)
    path.write_text(to_csv(table))
    again = load_schedule(str(path), 2, 4, 2, slack=1)
    assert (again.ticks["B"] == table.ticks["B"]).all()
    with pytest.raises(
        ValueError, match=r"pipeline.schedule='2f2b' does not exist; choose one of circular, gpipe"
    ):
        load_schedule("2f2b", 2, 4, 1)
