"""The directory of a run: its paths, and which configuration owns it. Imports no JAX."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.mirror import KEY as MIRROR
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.record import record_file
from maxpipe.checkpoint.steps import committed_steps, step_path
from maxpipe.config import Config, ConfigError, Problem, to_yaml
from maxpipe.config.options import OPTIONS, get
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.object_store import explained

# Keys that decide what a saved state means; all others may change from one start to the next.
IDENTITY = (
    "model",
    "seed",
    "optimizer.name",
    "data.source",
    "data.path",
    "data.mixture",
    "data.tokenizer",
    "data.packing",
    "data.sequence_length",
    "data.global_batch_size",
)
# Part of the identity unless checkpoint.convert_dtype is on.
DTYPES = ("model.dtype", "model.param_dtype")


class RunDirectory:
    """Paths below `<output_dir>/<run_name>`.

    Args:
      config: names them.
      mirror: of the checkpoints; those in it still belong to this run after the local directory is
        lost.

    Attributes:
      root: the directory itself.
      checkpoints: one directory per committed step.
      tensorboard: event files.
      metrics: `metrics.jsonl`, one row per step.
      config_file: `config.yml`, the resolved configuration of the latest start.
    """

    def __init__(self, config: Config, mirror: Mirror | None = None):
        self._mirror = mirror
        self.root = Path(config.output_dir) / config.run_name
        self.checkpoints = self.root / "checkpoints"
        self.tensorboard = self.root / "tensorboard"
        self.metrics = self.root / "metrics.jsonl"
        self.config_file = self.root / "config.yml"

    def claim(self, config: Config, *, write: bool = True) -> None:
        """Make the directory and write `config.yml`, unless it belongs to another configuration.

        A directory or mirror belongs to the configuration of its committed checkpoints, and to none
        while it has none. Either may lack checkpoints that the other has, but neither may hold
        those of another configuration. With several processes all of them call this and one writes.

        Args:
          config: the resolved configuration.
          write: if false, only check.

        Raises:
          ConfigError: the checkpoints belong to another configuration (one problem per key that
            differs), or the mirror holds another program's, or the directory cannot be written to;
            nothing is written.
        """
        if self._mirror is not None and (foreign := self._mirror.foreign()):
            held = (
                f"{self._mirror.url} holds {', '.join(foreign)}, which another program has written"
            )
            raise ConfigError(Problem(MIRROR, f"{held}: choose another run_name, or another place"))
        steps = committed_steps(self.checkpoints)
        places = [(str(self.checkpoints), self._recorded_configs(steps))] if steps else []
        if self._mirror is not None:
            places.append((self._mirror.url, self._mirrored_configs(self._mirror)))
        for place, configs in places:
            owner = next(configs, None)
            if owner is not None and (differences := _differences(config, owner)):
                conflicts = [_conflict(place, key, *pair) for key, pair in differences.items()]
                raise ConfigError(*conflicts, self._advice(place))
        if not write:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config_file, [to_yaml(config).encode()])
        except OSError as error:
            message = f"cannot write to {self.root}: {error.strerror}"
            raise ConfigError(Problem("output_dir", message)) from error

    def publish(self, config: Config) -> None:
        """Write `config.yml` to the mirror, which shows at once whether it can be written to.

        Raises:
          ConfigError: the mirror cannot be written to.
        """
        if self._mirror is None:
            return
        with explained(self._mirror.url, MIRROR, "written to"):
            self._mirror.write_config(to_yaml(config))

    def _advice(self, place: str) -> Problem:
        both = f" and {self._mirror.url}" if self._mirror else ""
        return Problem(
            "run_name",
            f"{place} belongs to another configuration: choose another run_name or restore its "
            f"values. checkpoint.resume=never is not enough: to use this name again, delete "
            f"{self.root}{both}",
        )

    def _recorded_configs(self, steps: list[int]) -> Iterator[Mapping[str, Any]]:
        """Yield the readable configurations: `config.yml`, then the checkpoints', newest first."""
        try:
            is_file = self.config_file.is_file()  # a pipe would never end
            text = self.config_file.read_text(encoding="utf-8") if is_file else ""
            written = yaml.safe_load(text)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            written = None  # lost or torn; the checkpoints have it too
        if isinstance(written, Mapping):
            yield written
        for step in reversed(steps):
            try:
                file = record_file(step_path(self.checkpoints, step))
                record = json.loads(file.read_bytes() if file.is_file() else b"")
                saved = record["meta"]["config"]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(saved, Mapping):
                yield saved

    def _mirrored_configs(self, mirror: Mirror) -> Iterator[Mapping[str, Any]]:
        """Yield the readable configurations of mirrored checkpoints, newest first."""
        with explained(mirror.url, MIRROR):
            for step in reversed(mirror.steps()):
                with suppress(CheckpointDamaged, CheckpointUnreadable, LookupError):
                    yield mirror.record(step).meta["config"]


def _conflict(place: str, key: str, ours: Any, theirs: Any) -> Problem:
    remedy = "; checkpoint.convert_dtype=true goes on all the same" if key in DTYPES else ""
    return Problem(
        key, f"is {ours!r}, but the checkpoints in {place} were made with {theirs!r}{remedy}"
    )


def _differences(config: Config, owner: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return identity keys whose values differ -> (value in `config`, value in `owner`).

    A key that `owner` lacks, saved by a version without it, counts as having had its default.
    """
    differing = {}
    for key, option in OPTIONS.items():
        if not any(key == name or key.startswith(f"{name}.") for name in IDENTITY):
            continue
        if key in DTYPES and config.checkpoint.convert_dtype:
            continue
        ours = get(config, key)
        theirs = _lookup(owner, key, None if option.bounds.derived else option.default)
        if theirs is not None and ours != theirs:
            differing[key] = (ours, theirs)
    return differing


def _lookup(tree: Mapping[str, Any], key: str, default: Any) -> Any:
    value: Any = tree
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value
