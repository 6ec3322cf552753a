"""Test scripts/loss_curve.py."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from helpers.scripts import load_script

loss_curve = load_script("loss_curve")
SVG = "{http://www.w3.org/2000/svg}"
TRAINED = {"step_seconds": 2.0, "tokens_per_second": 5.0}
ROWS = [{"step": step, "loss": 6.0 / step, **TRAINED} for step in range(1, 5)]
EVALUATIONS = [{"step": 2, "eval_loss": 3.5}, {"step": 4, "eval_loss": 3.0}]
WITH_EVALUATIONS = [*ROWS[:2], EVALUATIONS[0], *ROWS[2:], EVALUATIONS[1]]


@pytest.fixture
def run(tmp_path):
    """run(rows): the directory of a run with these metrics."""

    def _run(rows, name="run"):
        file = tmp_path / name / "metrics.jsonl"
        file.parent.mkdir()
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file.parent

    return _run


def drawn(*words):
    picture = words[0] / "drawn" / "loss.svg"
    assert loss_curve.main([*map(str, words), str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    lines = [line.get("points").split() for line in root.iter(f"{SVG}polyline")]
    points = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    return points, [text.text for text in root.iter(f"{SVG}text")]


def test_loss_curve_has_a_line_per_run_which_a_running_mean_makes_smooth(run):
    (falling, short), texts = drawn(run(ROWS, "a<b"), run(ROWS[:2]))
    heights = [height for _, height in falling]
    assert heights == sorted(heights)
    assert (len(falling), len(short)) == (4, 2)
    assert {"a<b: training", "run: training", "step"} <= {*texts}
    same = [loss_curve.Run(name, [(1, 2.0), (2, 1.0)], []) for name in "abc"]
    lines = ElementTree.fromstring(loss_curve.draw(same, nested=True)).iter(f"{SVG}polyline")
    widths = [float(line.get("stroke-width")) for line in lines]
    assert widths == sorted({*widths}, reverse=True)
    wave = run([{"step": step, "loss": 4 - step % 2} for step in range(4)], "wave")
    ((first, *others),), _ = drawn(wave, "--smooth", "2")
    assert len({height for _, height in others} - {first[1]}) == 1
    points = [(1, 4.0), (2, 2.0), (3, 6.0), (4, 1.0)]
    assert loss_curve.smooth(points, 3) == [(1, 4.0), (2, 3.0), (3, 4.0), (4, 3.0)]


def test_loss_curve_marks_evaluations_and_counts_tokens_up_to_a_torn_line(run):
    metrics = run([*WITH_EVALUATIONS, {"step": 5, "loss": None}])
    assert "run: training, evaluation (dots)" in drawn(metrics)[1]
    (line,), texts = drawn(metrics, "--eval-only", "--x", "tokens")
    assert len(line) == 2
    assert {"run: evaluation", "tokens"} <= {*texts}
    with (metrics / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    read = loss_curve.read_run(metrics / "metrics.jsonl", "tokens")
    assert [at for at, _ in read.train] == [10, 20, 30, 40]
    assert read.evaluation == [(20, 3.5), (40, 3.0)]


def test_loss_curve_that_cannot_be_drawn_exits_with_2(run, capsys):
    for rows, words, message in (
        (EVALUATIONS, [], "holds no training loss"),
        (ROWS, ["--eval-only"], "has no evaluation loss"),
    ):
        directory = run(rows, message)
        assert loss_curve.main([str(directory), str(directory / "loss.svg"), *words]) == 2
        assert message in capsys.readouterr().err
        assert not (directory / "loss.svg").exists()
