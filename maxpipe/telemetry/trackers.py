"""Send metrics to Weights & Biases and to MLflow, whose libraries are extras.

Accounts, servers, offline modes and retries are up to the libraries: `WANDB_API_KEY` or `wandb
login`, `WANDB_MODE`, `MLFLOW_TRACKING_URI`. A resumed run continues the tracker's run, whose id is
in the run's directory.
"""

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from operator import methodcaller
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from maxpipe.config.errors import redacted
from maxpipe.config.imports import is_installed, optional
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.sections import Config, TelemetryConfig
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, read_record
from maxpipe.telemetry.writers import PrintLine, Row

IDS = "trackers.json"  # in the run's directory
CLOSE_SECONDS = 15.0  # limit of the wait for all trackers at the end of a run
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
_COMPLETE = "metrics.jsonl has every step"
_MOST_PARAMETERS = 100  # that MLflow accepts at once
_REFUSED = re.compile(r"[^\w\-. :/]")  # characters that MLflow refuses in names of metrics

KeepId = Callable[[str], None]


class Tracker(Protocol):
    """Where metrics are sent to; any method may raise any error."""

    place: str  # where a user finds the run

    def log(self, step: int, scalars: Row) -> None: ...

    def close(self, *, is_done: bool) -> None: ...


class WandB:
    """A run of Weights & Biases, offline if there is no account or no network.

    `known` is the id of an old run, or ""; `keep` keeps an id for the next start.
    """

    def __init__(self, project: str, config: Config, directory: Path, known: str, keep: KeepId):
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        mode, why = _wandb_mode()
        entity, _, name = project.rpartition("/")
        run_id = known or uuid.uuid4().hex[:8]
        keep(run_id)
        self._run = wandb.init(
            entity=entity or None,
            project=name,
            name=config.run_name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=json.loads(redacted(json.dumps(asdict(config)))),
            mode=mode,
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=CLOSE_SECONDS * 2 / 3,
                # There may be another run in this process, such as one of the user's own.
                reinit="create_new",
                # Its facts about the machine hold the command line, whose URLs may have secrets.
                x_disable_meta=True,
            ),
        )
        # W&B's own step would refuse steps that a run repeats after a failure.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.url or why
        if self._run.offline:
            self.place = f"{why}; `wandb sync {self._run.settings.sync_dir}` sends it"

    def log(self, step: int, scalars: Row) -> None:
        points = {name: value for name, value in scalars.items() if value is not None}
        self._run.log({**points, "step": step})

    def close(self, *, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)


def _wandb_mode() -> tuple[str | None, str]:
    """Return the mode to ask for (None: the environment's) and why it is not online."""
    import wandb

    mode = wandb.setup().settings.mode
    if mode in ("offline", "dryrun", "disabled"):
        return None, f"WANDB_MODE={mode}"
    if wandb.run is not None:  # logging in is no longer possible then
        return ("offline", "offline as W&B is in this process") if wandb.run.offline else (None, "")
    try:
        if wandb.login(prompt=False):
            return None, ""
        return "offline", "offline without an API key (`wandb login`)"
    # A wrong key, or no network; the kind differs between versions.
    except Exception as error:
        return "offline", " ".join(f"offline, since logging in has failed: {error}".split())


class MLflow:
    """A run of MLflow, in an experiment that is made if it does not exist."""

    def __init__(self, experiment: str, config: Config, directory: Path, known: str, keep: KeepId):
        import mlflow
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        # They log each table that they make in a new database.
        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.WARNING)
        self._client = mlflow.MlflowClient()
        self._id = ""
        try:
            if known and self._client.get_run(known).info.lifecycle_stage == "active":
                self._client.update_run(known, status="RUNNING")
                self._id = known
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        if not self._id:
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            self._id = self._client.create_run(number, run_name=config.run_name).info.run_id
            values = {key: redacted(str(get(config, key))) for key in OPTIONS}
            # Some of its databases refuse empty ones.
            parameters = [Param(key, value) for key, value in values.items() if value]
            for first in range(0, len(parameters), _MOST_PARAMETERS):
                some = parameters[first : first + _MOST_PARAMETERS]
                self._client.log_batch(self._id, params=some)
        keep(self._id)
        self.place = f"run {self._id} at {mlflow.get_tracking_uri()}"

    def log(self, step: int, scalars: Row) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(_REFUSED.sub("_", name), value, now, step)
            for name, value in scalars.items()
            if isinstance(value, int | float)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, is_done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_done else "KILLED")


TRACKERS: Mapping[str, Callable[[str, Config, Path, str, KeepId], Tracker]] = {
    "wandb": WandB,
    "mlflow": MLflow,
}


def require_trackers(telemetry: TelemetryConfig) -> None:
    """Raise ConfigError if the library of a tracker that `telemetry.*` names is not installed."""
    for name in TRACKERS:
        if getattr(telemetry, name):
            with optional(name, name, f"telemetry.{name}"):
                if not is_installed(name):  # importing it takes seconds
                    raise ModuleNotFoundError(name, name=name)


class Trackers:
    """The trackers that `telemetry.*` names, in a thread, so that none slows or ends training.

    The first error of each is printed. One that cannot be opened is left out; a point that is not
    accepted is lost.
    """

    def __init__(self, config: Config, directory: Path, is_resumed: bool, print_line: PrintLine):
        self._print_line = print_line
        self._projects = {
            name: project for name in TRACKERS if (project := getattr(config.telemetry, name))
        }
        self._has_failed: set[str] = set()
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        run = config, directory, is_resumed
        self._thread = threading.Thread(target=self._work, args=run, daemon=True)
        if self._projects:
            self._thread.start()

    def log(self, step: int, scalars: Row) -> None:
        """Hand a row of points over, and return at once."""
        if self._projects:  # otherwise nobody takes them
            self._calls.put(methodcaller("log", step, scalars))

    def close(self, *, is_done: bool) -> None:
        """Wait until everything has been sent, for at most `CLOSE_SECONDS`."""
        self._calls.put(methodcaller("close", is_done=is_done))
        self._calls.put(None)
        if not self._projects:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            names = " and ".join(f"telemetry.{name}" for name in self._projects)
            self._print_line(f"warning: {names}: not everything was sent in time; {_COMPLETE}")

    def _work(self, config: Config, directory: Path, is_resumed: bool) -> None:
        ids: dict[str, str] = {}
        with suppress(Damaged):
            ids = read_record(directory / IDS, dict[str, str])
        trackers: dict[str, Tracker] = {}
        for name, project in self._projects.items():
            with self._reporting(name):
                key = f"{name} {project}"
                known = ids.get(key, "") if is_resumed else ""
                keep = partial(_keep_id, directory / IDS, ids, key)
                tracker = trackers[name] = TRACKERS[name](project, config, directory, known, keep)
                self._print_line(_without_secrets(f"telemetry.{name}: {tracker.place}"))
        while (call := self._calls.get()) is not None:
            for name, tracker in trackers.items():
                with self._reporting(name):
                    call(tracker)

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the libraries raise whatever they like
            if name not in self._has_failed:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                text = f"warning: telemetry.{name} has failed: {reason}; training continues"
                self._print_line(_without_secrets(f"{text}, and {_COMPLETE}"))
            self._has_failed.add(name)


def _keep_id(path: Path, ids: dict[str, str], key: str, run_id: str) -> None:
    ids[key] = run_id
    write_atomically(path, [json.dumps(ids, indent=2).encode() + b"\n"])


def _without_secrets(text: str) -> str:
    """Hide the trackers' secrets, in URLs and from environment variables."""
    for name in _SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return redacted(text)
