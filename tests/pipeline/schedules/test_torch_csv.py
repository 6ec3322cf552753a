"""CSV files in the forms in which torch.distributed.pipelining dumps its schedules."""

import pytest

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


def read(path, text, *sizes, **options):
    path.write_text(text)
    return load_csv(path, *sizes, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "torch.csv"


def without_idle_cells(text):
    return "".join(",".join(filter(None, line.split(","))) + "\n" for line in text.splitlines())


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "mpmd" in SCHEDULES[name].engines])
def test_load_csv_without_idle_cells_runs_units_as_early_as_their_inputs_allow(name, path):
    repeats = SCHEDULES[name].repeats_for(2)
    for S, M in ((2, 1), (2, 3), (4, 7)):
        table = load_schedule(name, S, M, repeats)
        # In ticks of its own, which a lockstep table such as gpipe's does not have.
        path.write_text(without_idle_cells(to_csv(table)))
        again = load_csv(path, S, M, repeats)
        assert without_idle_cells(to_csv(again)) == path.read_text()
        assert csv_sizes(path) == (S, M, repeats)
        assert "read as an order of units, not as ticks: it has no idle cells" in again.note
        if not table.lockstep:
            assert to_csv(again) == to_csv(table)


def test_load_csv_with_overlaps_is_the_forward_and_then_the_backward(path):
    table = read(path, DUALPIPE_V, 2, 4, 2)
    assert (table.placement, table.lockstep) == ("v", False)
    assert without_idle_cells(to_csv(table)).splitlines()[1].startswith("1F0,2F0,1F1,2F1,1F2,2B0")
    own = load_schedule("dualpipe_v", 2, 4, 2)
    assert without_idle_cells(to_csv(table)) == without_idle_cells(to_csv(own))
    assert "it has cells with two units" in table.note


def test_load_csv_with_transfers_and_gathers_ignores_them_and_says_so(path):
    table = read(path, COMPUTE_COMMS, 2, 2, 1)
    assert to_csv(table) == to_csv(load_schedule("1f1b", 2, 2))
    assert table.note == (
        f"pipeline.schedule={path}: read as an order of units, not as ticks: the engines place "
        "transfers, gathers and reductions themselves, so 14 cells are ignored (RECV_B, RECV_F, "
        "REDUCE_GRAD, RESHARD, SEND_B, SEND_F, UNSHARD)"
    )


def test_load_csv_with_idle_cells_keeps_its_ticks_and_has_no_note(path):
    table = read(path, "0F0,,,,0B0\n,,1F0,1B0,\n", 2, 1, 1)
    assert table.num_ticks == 5
    assert table.note == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Row 1 waits for the circle of rows 2 and 3.
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n",
            r"wait for ever: .*2F1 \(row 3, column 2\) for 1F1 \(row 2, column 3\)",
        ),
        (
            "0B0,0F0\n1F0,1B0\n",
            r"wait for ever: .*1F0 \(row 2, column 1\) for 0F0 \(row 1, column 2\)",
        ),
        ("0F0,0B0\n1F0\n", "1B0 is missing on row 2"),
        ("0F0,0B0,0F0\n1F0,1B0\n", r"0F0 \(row 1, column 3\) is doubled: .* \(row 1, column 1\)"),
        ("0F0,0B0\n1F0,1UNSHARDED\n", "row 2, column 2: '1UNSHARDED' is not a unit"),
        ("(0F0;0F1)OVERLAP_F_B\n1F0\n", r"row 1, column 1: '\(0F0;0F1\)OVERLAP_F_B' is not a unit"),
        ("0UNSHARD\n1UNSHARD\n", "the file has no units"),
    ],
)
def test_load_csv_of_a_bad_order_names_row_column_and_cell(text, message, path):
    stages = text.count("\n")
    with pytest.raises(ScheduleError, match=message) as error:
        read(path, text, stages, stages - 1, 1)
    assert str(error.value).startswith(f"pipeline.schedule={path}: ")


def test_load_csv_of_an_order_with_a_forwarding_delay_is_refused(path):
    message = "delay_activation_forwarding=true: .* is an order of units without ticks"
    with pytest.raises(ScheduleError, match=message):
        read(path, COMPUTE_COMMS, 2, 2, 1, forwarding_delay=2)


def test_schedule_of_a_torch_dump_says_once_what_it_ignores(path, capsys):
    path.write_text(COMPUTE_COMMS)
    assert main([str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("are ignored") == 1
    assert captured.err.startswith(f"schedule={path}: read as an order")
    assert "2 stages, 2 microbatches, 1 repeat, 6 free-running ticks" in captured.out
