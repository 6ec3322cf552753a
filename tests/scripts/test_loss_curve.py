"""Test scripts/loss_curve.py."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from helpers.scripts import load_script

loss_curve = load_script("loss_curve")
SVG = "{http://www.w3.org/2000/svg}"


def write_metrics(path, rows):
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_loss_curve_has_a_line_per_run_and_a_dot_per_evaluation(tmp_path):
    rows = [{"step": step, "loss": 6.0 / step} for step in range(1, 9)] + [
        {"step": 8, "eval_loss": 1.0}
    ]
    first = write_metrics(tmp_path / "a<b" / "metrics.jsonl", rows)
    second = write_metrics(tmp_path / "plain" / "metrics.jsonl", rows[:4])
    picture = tmp_path / "out" / "loss.svg"
    assert loss_curve.main([str(first), str(second), str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [8, 4]
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights)
    assert max(heights) < loss_curve.HEIGHT
    assert any("a<b" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_read_run_skips_null_losses_and_a_torn_line(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    path = write_metrics(tmp_path / "run" / "metrics.jsonl", rows)
    path.write_text(path.read_text() + '{"step": 3, "lo')
    run = loss_curve.read_run(path)
    assert run.train == [(1, 2.0)]
    assert "<polyline" in loss_curve.draw([run])


def test_loss_curve_of_a_file_without_losses_exits_with_2(tmp_path, capsys):
    path = write_metrics(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "eval_loss": 2.0}])
    assert loss_curve.main([str(path), str(tmp_path / "loss.svg")]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "loss.svg").exists()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 200, [0, 50, 100, 150, 200]),
        (2.4, 5.8, [3, 4, 5]),
        (1, 1.3, [1, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert loss_curve.ticks(low, high) == pytest.approx(expected)


def test_loss_curve_takes_the_directory_of_a_run(tmp_path):
    metrics = write_metrics(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert loss_curve.read_run(metrics.parent) == loss_curve.read_run(metrics)
    assert loss_curve.read_run(metrics.parent).name == "run"


@pytest.fixture
def metrics(tmp_path):
    """Four steps of 10 tokens with the losses 4, 2, 4, 2, and evaluations after two of them."""
    rows = [
        {"step": step, "loss": loss, "tokens_per_second": 10 / 3, "step_seconds": 3.0}
        for step, loss in enumerate([4.0, 2.0, 4.0, 2.0], 1)
    ]
    rows.insert(2, {"step": 2, "eval_loss": 3.5})
    return write_metrics(tmp_path / "run" / "metrics.jsonl", [*rows, {"step": 4, "eval_loss": 3.0}])


def drawn(metrics, *flags):
    """Return the points of the line in a picture, and its texts."""
    picture = metrics.parent / "loss.svg"
    assert loss_curve.main([str(metrics), str(picture), *flags]) == 0
    root = ElementTree.parse(picture).getroot()
    (line,) = (line.get("points").split() for line in root.iter(f"{SVG}polyline"))
    points = [tuple(map(float, point.split(","))) for point in line]
    return points, [text.text for text in root.iter(f"{SVG}text")]


def test_smooth_is_the_mean_of_a_point_and_those_before_it():
    points = [(1, 4.0), (2, 2.0), (3, 6.0), (4, 1.0)]
    assert loss_curve.smooth(points, 1) == points
    assert loss_curve.smooth(points, 3) == [(1, 4.0), (2, 3.0), (3, 4.0), (4, 3.0)]


def test_loss_curve_smooth_draws_running_means(metrics):
    points, _ = drawn(metrics, "--smooth", "2")
    heights = [height for _, height in points]
    assert heights[1] == heights[2] == heights[3] > heights[0]


def test_loss_curve_eval_only_draws_evaluations_as_the_line(metrics):
    points, texts = drawn(metrics, "--eval-only")
    assert len(points) == 2
    assert "run: evaluation" in texts
    assert "run: training, evaluation (dots)" in drawn(metrics)[1]


def test_loss_curve_eval_only_of_a_run_without_evaluations_exits_with_2(tmp_path, capsys):
    path = write_metrics(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    assert loss_curve.main([str(path), str(tmp_path / "loss.svg"), "--eval-only"]) == 2
    assert "run has no evaluation loss" in capsys.readouterr().err


def test_loss_curve_over_tokens_counts_those_of_the_steps(metrics):
    assert [at for at, _ in loss_curve.read_run(metrics, "tokens").train] == [10, 20, 30, 40]
    assert loss_curve.read_run(metrics, "tokens").evaluation == [(20, 3.5), (40, 3.0)]
    texts = drawn(metrics, "--x", "tokens")[1]
    assert "tokens" in texts
    assert "step" not in texts


@pytest.mark.parametrize("word", ["0", "-1", "2.5"])
def test_loss_curve_smooth_of_no_points_is_refused(metrics, word, capsys):
    with pytest.raises(SystemExit):
        loss_curve.main([str(metrics), "loss.svg", "--smooth", word])
    assert "whole number" in capsys.readouterr().err
