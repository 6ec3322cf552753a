import dataclasses
import json

import pytest

from maxpipe.config.sections import Config, TelemetryConfig
from maxpipe.telemetry.recorder import Recorder


def recorder(tmp_path, *, start_step=0, log_every=10, peak_flops=None, is_main=True, steps=20):
    config = dataclasses.replace(
        Config(), steps=steps, telemetry=TelemetryConfig(log_every=log_every)
    )
    return Recorder(
        config,
        tmp_path / "run",
        start_step=start_step,
        tokens_per_step=4096,
        flops_per_step=2e9,
        peak_flops=peak_flops,
        is_main=is_main,
    )


def rows(tmp_path):
    return [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def logged_scalars(directory):
    """Return (tag, step) of every scalar in the event files of `directory`, in order."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(directory.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(value.tag, event.step) for value in event.summary.value]
            at += 12 + length + 4
    return found


def test_recorder_writes_every_step_whatever_log_every_is(tmp_path):
    r = recorder(tmp_path, log_every=10, peak_flops=1e10)
    for step in range(1, 13):
        r.step(step, 5.0 / step, 1.5, 3e-4, 0.5, skipped=0)
    r.evaluation(12, 2.25)
    r.close()
    written = rows(tmp_path)
    assert [row["step"] for row in written] == [*range(1, 13), 12]
    assert written[2] == {
        "step": 3,
        "loss": 5.0 / 3,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "step_seconds": 0.5,
        "tokens_per_second": 8192.0,
        "mfu": 0.4,
        "skipped": 0,
    }
    assert written[-1] == {"step": 12, "eval_loss": 2.25}


def test_recorder_unknown_peak_writes_null_mfu(tmp_path):
    r = recorder(tmp_path)
    r.step(1, 5.0, 1.5, 3e-4, 0.5)
    r.close()
    assert rows(tmp_path)[0]["mfu"] is None


def test_recorder_tensorboard_has_first_tenth_and_last_step(tmp_path):
    r = recorder(tmp_path, steps=13)
    for step in range(1, 14):
        r.step(step, 5.0, 1.5, 3e-4, 0.5, skipped=int(step == 10))
    r.evaluation(13, 2.25)
    r.close()
    scalars = logged_scalars(tmp_path / "run" / "tensorboard")
    assert [step for tag, step in scalars if tag == "train/loss"] == [1, 10, 13]
    assert [step for tag, step in scalars if tag == "train/skipped"] == [10]
    assert ("eval/loss", 13) in scalars


def test_recorder_resumed_run_repeats_no_step(tmp_path):
    r = recorder(tmp_path)
    for step in range(1, 8):
        r.step(step, 5.0, 1.5, 3e-4, 0.5)
    r.close()
    r = recorder(tmp_path, start_step=5)
    for step in range(6, 9):
        r.step(step, 4.0, 1.5, 3e-4, 0.5)
    r.close()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        *((step, 5.0) for step in range(1, 6)),
        *((step, 4.0) for step in range(6, 9)),
    ]


def test_recorder_log_every_0_writes_metrics_file_only(tmp_path, capsys):
    r = recorder(tmp_path, log_every=0)
    r.step(1, 5.0, 1.5, 3e-4, 0.5)
    r.close()
    assert len(rows(tmp_path)) == 1
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert capsys.readouterr().out == ""


def test_recorder_other_process_writes_and_prints_nothing(tmp_path, capsys):
    r = recorder(tmp_path, is_main=False)
    r.step(1, 5.0, 1.5, 3e-4, 0.5)
    r.evaluation(1, 2.0)
    r.say("hello")
    r.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_recorder_extra_value_must_not_hide_another(tmp_path):
    r = recorder(tmp_path)
    with pytest.raises(AssertionError, match="mfu"):
        r.step(1, 5.0, 1.5, 3e-4, 0.5, mfu=1.0)
    r.close()
