"""Runs in Weights & Biases and MLflow, without a network."""

import json
import sys
import threading

import pytest

from maxpipe.config import ConfigError, replace
from maxpipe.config.sections import Config, TelemetryConfig
from maxpipe.telemetry import trackers
from maxpipe.telemetry.recorder import Recorder
from maxpipe.telemetry.trackers import IDS, Trackers, require_trackers
from maxpipe.telemetry.writers import TelemetryError

ENOUGH = 120.0  # seconds, on a busy machine


def _record(tmp_path, steps, **telemetry):
    """Record steps of a run of 4 steps as one process does, and return the ids of its trackers."""
    mixture = [{"source": "jsonl", "path": "s3://me:secret@bucket/x", "weight": 1}]
    keys = {"steps": 4, "run_name": "name", "output_dir": str(tmp_path), "data.mixture": mixture}
    keys |= {f"telemetry.{key}": value for key, value in telemetry.items()}
    config = replace(Config(), **keys, **{"telemetry.log_every": 1})
    recorder = Recorder(
        config, tmp_path / "name", start_step=steps.start - 1, tokens_per_step=1, peak_seconds=None
    )
    for step in steps:
        recorder.step(step, 1 / step, 1.0, 1e-3, 0.5)
    recorder.evaluation(steps[-1], 0.5, by_source={"jsonl:a#1": 0.25})
    recorder.close()
    ids = tmp_path / "name" / IDS
    return ids.read_text() if ids.exists() else ""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", ENOUGH)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb", reason="needs the extra `wandb`")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    yield
    if wandb.run is not None:
        wandb.run.finish()
    wandb.teardown()


def _history(tmp_path):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its own process may still be writing
    points = {}
    for file in sorted(tmp_path.glob("name/wandb/offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            items = Record.FromString(data).history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            for name in row.keys() - {"step"}:
                points.setdefault(name, []).append((row["step"], row[name]))
    return points


def _records(content):
    block, header, at, record = 1 << 15, 7, 7, b""
    while at + header <= len(content):
        if block - at % block < header:  # padding
            at += block - at % block
            continue
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        record += content[at + header : at + header + length]
        if content[at + 6] in (1, 4):  # whole, or the last piece
            yield record
            record = b""
        at += header + length


@pytest.mark.usefixtures("offline")
def test_wandb_offline_has_the_points_and_no_secrets_and_a_resumed_run_its_id(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("sys.argv", ["train", "data.path=s3://me:secret@bucket/x"])
    first = _record(tmp_path, range(1, 3), wandb="project")
    assert "telemetry.wandb: WANDB_MODE=offline; `wandb sync" in capfd.readouterr().out
    assert _record(tmp_path, range(3, 5), wandb="project") == first
    (run_id,) = json.loads(first).values()
    files = [*tmp_path.glob("name/wandb/offline-run-*/*.wandb")]
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * 2
    points = _history(tmp_path)
    assert points["train/loss"] == [(step, 1 / step) for step in range(1, 5)]
    assert points["eval/loss"] == [(2, 0.5), (4, 0.5)]
    written = [file for file in (tmp_path / "name").rglob("*") if file.is_file()]
    assert not any(b"secret" in file.read_bytes() for file in written)
    assert any(b"***@bucket" in file.read_bytes() for file in files)
    # A start from the beginning is another run.
    assert _record(tmp_path, range(1, 3), wandb="project") != first


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "offline without an API key (`wandb login`); `wandb sync"),
        ("short-key", "offline, since logging in has failed: WANDB_API_KEY invalid: "),
    ],
)
def test_wandb_without_an_account_or_with_a_wrong_key_is_offline_and_says_why(
    tmp_path, monkeypatch, capfd, key, reason
):
    monkeypatch.setenv("WANDB_MODE", "online")
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    _record(tmp_path, range(1, 3), wandb="entity/project")
    assert reason in capfd.readouterr().out
    assert _history(tmp_path)["train/loss"] == [(1, 1), (2, 1 / 2)]


@pytest.mark.usefixtures("offline")
def test_wandb_leaves_another_run_of_the_process_alone(tmp_path):
    import wandb

    other = wandb.init(project="own", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    (run_id,) = json.loads(_record(tmp_path, range(1, 5), wandb="project")).values()
    assert run_id != other.id
    assert wandb.run is other
    other.log({"still": 1})  # raises after the end of a run
    other.finish()
    assert _history(tmp_path)["train/loss"] == [(step, 1 / step) for step in range(1, 5)]


class Tracker:
    """Keeps what it gets; refuses the points of some steps, and waits for `may_go` before each."""

    place = "https://me:secret@server"

    def __init__(self, refused=()):
        self.steps = []
        self.is_done = None
        self.may_go = threading.Event()
        self.may_go.set()
        self._refused = refused

    def log(self, step, scalars):
        assert self.may_go.wait(ENOUGH)
        if step in self._refused:
            raise RuntimeError("no\nroute to https://me:secret@server")
        self.steps.append(step)

    def close(self, *, is_done):
        self.is_done = is_done


def _track(monkeypatch, directory, open_tracker):
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", open_tracker)
    lines = []
    config = replace(Config(), **{"telemetry.mlflow": "experiment"})
    tracking = Trackers(config, directory, False, lines.append)
    for step in range(4):
        tracking.log(step, {})
    return tracking, lines


def test_trackers_get_all_points_in_order_and_the_first_refusal_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "route")
    tracker = Tracker(refused=(1, 2))
    tracking, lines = _track(monkeypatch, tmp_path, lambda *_: tracker)
    tracking.close(is_done=True)
    assert tracker.steps == [0, 3]
    assert tracker.is_done
    warning = "warning: telemetry.mlflow has failed: RuntimeError: no *** to https://***@server; "
    assert lines == [
        "telemetry.mlflow: https://***@server",
        f"{warning}training continues, and metrics.jsonl has every step",
    ]


def test_tracker_that_cannot_be_opened_is_said_once_without_secrets(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no route to a://b:secret@c")

    tracking, lines = _track(monkeypatch, tmp_path, refuse)
    tracking.close(is_done=True)
    (line,) = lines
    assert line.startswith("warning: telemetry.mlflow has failed: OSError: no route to a://***@c; ")


def test_run_does_not_wait_for_a_tracker_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    tracker = Tracker()
    tracker.may_go.clear()
    tracking, lines = _track(monkeypatch, tmp_path, lambda *_: tracker)
    tracking.close(is_done=False)
    warning = "not everything was sent in time; metrics.jsonl has every step"
    assert f"warning: telemetry.mlflow: {warning}" in lines
    tracker.may_go.set()


def test_trackers_are_closed_when_the_metrics_cannot_be(tmp_path, monkeypatch):
    tracker = Tracker()
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda *_: tracker)
    config = replace(Config(), **{"telemetry.mlflow": "experiment"})
    recorder = Recorder(config, tmp_path, start_step=0, tokens_per_step=1, peak_seconds=None)

    def fail(file):
        raise TelemetryError("full")

    monkeypatch.setattr("maxpipe.telemetry.recorder.MetricsFile.close", fail)
    with pytest.raises(TelemetryError, match="full"):
        recorder.close()
    assert tracker.is_done is False


@pytest.fixture
def client(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    pytest.importorskip("sqlalchemy", reason="needs the extra `mlflow`")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return mlflow.MlflowClient(tracking_uri=uri)


def test_mlflow_has_the_points_and_a_resumed_run_its_id(tmp_path, client):
    first = _record(tmp_path, range(1, 3), mlflow="experiment")
    (run_id,) = json.loads(first).values()
    assert client.get_run(run_id).info.status == "KILLED"  # for it has not come to its end
    assert _record(tmp_path, range(3, 5), mlflow="experiment") == first
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "name"
    assert client.get_experiment(run.info.experiment_id).name == "experiment"
    history = client.get_metric_history(run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(n, 1 / n) for n in range(1, 5)]
    assert run.data.metrics["eval/loss/jsonl:a_1"] == 0.25
    assert run.data.params["steps"] == "4"
    assert "***@bucket" in run.data.params["data.mixture"]
    assert "secret" not in str(run.data.params)


def test_mlflow_run_that_its_server_has_not_or_has_deleted_is_made_anew(tmp_path, client):
    first = _record(tmp_path, range(1, 3), mlflow="experiment")
    (tmp_path / "name" / IDS).write_text(first.replace('": "', '": "0'))
    (second,) = json.loads(_record(tmp_path, range(3, 4), mlflow="experiment")).values()
    client.delete_run(second)
    (third,) = json.loads(_record(tmp_path, range(4, 5), mlflow="experiment")).values()
    for run_id, step in ((second, 3), (third, 4)):
        history = client.get_metric_history(run_id, "train/loss")
        assert [point.step for point in history] == [step]


def test_mlflow_run_that_cannot_be_looked_up_keeps_its_id(tmp_path, client, monkeypatch, capfd):
    first = _record(tmp_path, range(1, 3), mlflow="experiment")

    def refuse(*_):
        from mlflow.exceptions import MlflowException

        raise MlflowException("busy")

    monkeypatch.setattr("mlflow.MlflowClient.get_run", refuse)
    assert _record(tmp_path, range(3, 4), mlflow="experiment") == first
    assert "warning: telemetry.mlflow has failed: MlflowException: busy" in capfd.readouterr().out


def test_tracker_without_its_library_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    require_trackers(TelemetryConfig())
    for name in ["wandb", "mlflow"]:
        # A folder of its name, such as one with its files, is not the library.
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(ConfigError, match=rf"^telemetry\.{name}: needs {name}, .*\[{name}\]"):
            require_trackers(TelemetryConfig(**{name: "project"}))
