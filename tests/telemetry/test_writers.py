import errno
import json
import math
from functools import partial

import pytest

from maxpipe.telemetry.writers import MetricsFile, Sink, TelemetryError, TensorBoard


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_file_numbers_round_trip_exactly_before_its_end_and_those_that_are_none_are_null(
    tmp_path,
):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n')  # of a run before this one
    values = [0.1 + 0.2, 1e-45, 5.545177444479562, 3.0e38]
    file = MetricsFile(path, 0)
    for step, value in enumerate([*values, math.nan, math.inf, -math.inf], start=1):
        file.write({"step": step, "loss": value})
    lines = path.read_text().splitlines()
    file.close()
    found = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines]
    assert found == [*values, None, None, None]


def test_metrics_file_reopened_drops_later_steps_and_what_are_no_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "eval_loss": 2}'
    kept = kept.splitlines()
    no_rows = (b"not json", b"[1]", b"\0\0\0", b"\xff", b'{"loss": 1.0}', b'{"step": "two"}')
    for damaged in (b'{"step": 3, "loss": 1.5}', *no_rows):
        path.write_bytes(b"\n".join([kept[0], damaged, *kept[1:], b'{"step": 2, "loss": 1}']))
        file = MetricsFile(path, 2)
        file.write({"step": 3, "loss": 1.25})
        file.close()
        assert path.read_bytes().splitlines() == [*kept, b'{"step": 3, "loss": 1.25}']
        assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_file_rows_of_changes_are_written_again_by_a_start_from_the_same_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for last_step in (0, 2, 2):
        file = MetricsFile(path, last_step)
        if last_step:
            file.write_change(2, "steps", 2, 4)
        else:
            file.write({"step": 2, "loss": 2.0})
        file.close()
    expected = [{"step": 2, "loss": 2.0}, {"step": 2, "changed": "steps", "before": 2, "now": 4}]
    assert rows(path) == expected
    MetricsFile(path, 3).close()
    assert rows(path) == expected


BEFORE = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.0}', '{"step": 3, "loss": 1.5}']


@pytest.fixture
def gone_back(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join([*BEFORE, "torn", ""]))
    file = MetricsFile(tmp_path / "metrics.jsonl", 1, keeps_later=True)
    file.write({"step": 2, "loss": 2.25})
    return file


def test_metrics_file_of_a_start_that_goes_back_keeps_later_rows_until_they_are_given_up(
    tmp_path, gone_back
):
    path = tmp_path / "metrics.jsonl"
    assert path.read_text().splitlines()[:3] == BEFORE
    assert rows(tmp_path / "metrics.unsaved.jsonl") == [{"step": 2, "loss": 2.25}]
    gone_back.give_up_later()
    gone_back.write({"step": 3, "loss": 2.0})
    gone_back.give_up_later()
    gone_back.close()
    expected = [BEFORE[0], '{"step": 2, "loss": 2.25}', '{"step": 3, "loss": 2.0}']
    assert path.read_text().splitlines() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("keeps_later", [False, True])
def test_metrics_file_reopened_without_giving_up_has_the_later_rows(
    tmp_path, gone_back, keeps_later
):
    gone_back.close()
    file = MetricsFile(tmp_path / "metrics.jsonl", 2 if keeps_later else 3, keeps_later=keeps_later)
    if keeps_later:
        file.write({"step": 3, "loss": 1.25})
        file.give_up_later()
    file.close()
    last = '{"step": 3, "loss": 1.25}' if keeps_later else BEFORE[2]
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [*BEFORE[:2], last]
    assert keeps_later or not (tmp_path / "metrics.unsaved.jsonl").exists()


def test_metrics_file_counts_steps_of_a_start_that_had_saved_nothing_as_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {i}, "step_seconds": 0.5}}\n' for i in (1, 2, 3)))
    apart = tmp_path / "metrics.unsaved.jsonl"
    apart.write_text("".join(f'{{"step": {i}, "step_seconds": 2.0}}\n' for i in (2, 3)))
    file = MetricsFile(path, 3)
    file.close()
    assert file.lost_seconds == 4
    apart.write_text('{"step": 2, "step_seconds": 2.0}\n')
    file = MetricsFile(path, 1, keeps_later=True)
    file.give_up_later()
    file.close()
    assert file.lost_seconds == 3


def test_tensorboard_leaves_values_out_that_are_not_finite(tmp_path, caplog):
    """The library would warn of each of them on the console."""
    board = TensorBoard(tmp_path, last_step=0)
    board.write(1, {"loss": math.nan, "grad_norm": math.inf, "tokens": 7})
    board.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"tokens" in content
    assert b"loss" not in content
    assert caplog.text == ""


def write(asked, text):
    asked.append(text)
    if text == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    return asked


@pytest.mark.parametrize("tries_again", [False, True])
def test_sink_says_its_first_error_and_may_give_up_after_it(tries_again):
    written, lines = [], []
    options = {"is_required": False, "print_line": lines.append, "tries_again": tries_again}
    sink = Sink("the log", lambda: written, **options)
    for text in ("a", "full", "full", "b"):
        sink.use(lambda asked, text=text: write(asked, text))
    for _ in range(2):
        sink.close(lambda asked: write(asked, "close"))
    asked = ["a", "full", "full", "b", "close"] if tries_again else ["a", "full"]
    assert written == asked
    reason = "the log cannot be written: No space left on device"
    warning = f"warning: {reason}; training continues; telemetry.required=true would end it"
    lack = "the log lacks what could not be written 2 times"
    assert lines == [warning, lack][: 1 + tries_again]


@pytest.mark.parametrize("fails_at", ["open", "write", "close"])
def test_required_sink_raises_whenever_it_fails(fails_at):
    def text(place):
        return "full" if place == fails_at else place

    def run():
        opened = partial(write, [], text("open"))
        sink = Sink("the log", opened, is_required=True, print_line=pytest.fail)
        sink.use(lambda asked: write(asked, text("write")))
        sink.close(lambda asked: write(asked, text("close")))

    with pytest.raises(TelemetryError, match=r"No space left on device \(telemetry.required\)$"):
        run()
