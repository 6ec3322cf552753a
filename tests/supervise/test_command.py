"""The command that supervises a run: its options, and what it shows of a run."""

import json

import pytest

from maxpipe.config import ConfigError
from maxpipe.supervise import __main__ as supervise

STATUS = {
    "state": "trains",
    "attempt": 3,
    "restarts": 2,
    "last_end": "process 1 ended by SIGKILL",
    "members": {str(index): f"host{index}" for index in (10, 2, 0, 1)},
}


def test_status_shows_members_in_order_and_the_last_step_however_long_its_row(tmp_path):
    (tmp_path / "supervisor.json").write_text(json.dumps(STATUS))
    rows = [
        {"step": 6, "loss": 2.0},
        {"step": 7, "loss": 1.0, "expert_load": [0.5] * 50_000},
        {"step": 7, "eval_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = supervise.status(tmp_path)
    assert lines[0].endswith(": trains")
    assert lines[1] == "processes   0 on host0, 1 on host1, 2 on host2, 10 on host10"
    assert lines[2] == "step        7"
    assert lines[3] == "checkpoint  none"
    assert lines[4] == "restarts    2; the last attempt: process 1 ended by SIGKILL"


def test_status_after_going_back_shows_the_steps_of_this_start(tmp_path):
    (tmp_path / "supervisor.json").write_text(json.dumps(STATUS))
    (tmp_path / "metrics.jsonl").write_text('{"step": 300, "loss": 1.0}\n')
    apart = tmp_path / "metrics.unsaved.jsonl"
    apart.touch()
    assert supervise.status(tmp_path)[2] == "step        none since it went back"
    apart.write_text('{"step": 101, "loss": 2.0}\n')
    assert supervise.status(tmp_path)[2] == "step        101"


@pytest.mark.parametrize(
    "text",
    ["{}", json.dumps({**STATUS, "state": 1}), json.dumps({**STATUS, "members": {"a": "b"}})],
)
def test_status_that_is_missing_or_damaged_is_a_config_error(tmp_path, text):
    with pytest.raises(ConfigError, match="RUN_DIR is <output_dir>/<run_name> of a run under"):
        supervise.status(tmp_path)
    (tmp_path / "supervisor.json").write_text(text)
    with pytest.raises(ConfigError, match=r"supervisor.json, or it is damaged"):
        supervise.status(tmp_path)


@pytest.mark.parametrize(
    "words", [("--max-restarts", "-1"), ("--pause", "-0.5"), ("--wait", "nan"), ("--pause", "soon")]
)
def test_options_below_0_end_with_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        supervise.main([*words, "--", "true"])
    assert end.value.code == 2
    assert words[1] in capsys.readouterr().err
