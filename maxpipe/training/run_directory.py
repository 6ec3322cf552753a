"""Lay out the directory of a run, and tell which configuration owns it. Imports no JAX."""

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.mirror import KEY as MIRROR
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.steps import CHECKPOINTS, StepsDirectory, StepStore
from maxpipe.config import Config, ConfigError, Problem, to_yaml
from maxpipe.config.identity import (
    FINGERPRINTED,
    Change,
    changes,
    is_allowed,
    may_grow,
    refusals,
)
from maxpipe.config.sections import DataConfig
from maxpipe.data.chat_template import trained_template
from maxpipe.data.tokenizers import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    template_files,
    tokenizer_files,
)
from maxpipe.hf.origin import ORIGIN, read_origin
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.object_store import explained

Meta = Mapping[str, Any]  # what a checkpoint says of its run: "config", "fingerprint", "versions"


class RunDirectory:
    """What lies below `<output_dir>/<run_name>`, as one start of the run sees it.

    Args:
      config: the configuration of this start, which names the directory.
      mirror: mirror of the checkpoints, which still belongs to this run if the directory is lost.
      derived: keys that are not set but derived from others.
    """

    def __init__(self, config: Config, mirror: Mirror | None = None, derived: Collection[str] = ()):
        self.config = config
        self._mirror = mirror
        self._derived = derived
        self.root = Path(config.output_dir) / config.run_name
        self.checkpoints = self.root / CHECKPOINTS
        self._steps = StepsDirectory(self.checkpoints)
        self.config_file = self.root / "config.yml"
        self.tokenizer = self.root / TOKENIZER
        self.origin = self.root / ORIGIN
        self.config_history = self.root / "config_history"

    def check_place(self) -> None:
        """Raise ConfigError if the directory cannot be made or written to."""
        # Unlike Path's methods, os.path's raise nothing below a directory that may not be entered.
        nearest = next(filter(os.path.exists, (self.root, *self.root.absolute().parents)))
        if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
            reason = os.strerror(errno.EACCES if os.path.isdir(nearest) else errno.ENOTDIR)
            message = f"cannot write to {self.root}: {reason}"
            raise ConfigError(Problem("output_dir", message))

    def check_owner(self) -> None:
        """Refuse a directory or mirror that belongs to another configuration.

        They belong to the configuration of their committed checkpoints, and to none while they have
        none. Either may lack checkpoints that the other has.
        """
        steps = self._steps.steps()
        if (resume := self.config.checkpoint.resume).isdecimal():
            steps = [step for step in steps if step == int(resume)]
        places = [(str(self.checkpoints), self._recorded(steps))] if steps else []
        if self._mirror is not None:
            places.append((self._mirror.url, self._mirrored(self._mirror)))
        for place, metas in places:
            if (owner := next(metas, None)) is not None:
                self.check(owner, place)

    def claim(self, *, is_new: bool = True) -> None:
        """Write `config.yml` and the tokenizer's files, here and to the mirror; on process 0.

        A new run also keeps small files of the folder that it is imported from, in `origin/`.
        """
        self.check_owner()
        tokenizer = _tokenizer_contents(self.config.data)
        with _explained(f"write to {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config_file, [self._yaml()])
            _replace_files(self.tokenizer, tokenizer)
            if is_new:
                _replace_files(self.origin, read_origin(self.config))
        if self._mirror is None:
            return
        with explained(self._mirror.url, MIRROR, "written to"):
            self._mirror.write_file("config.yml", self._yaml())
            for name, content in tokenizer.items():
                self._mirror.write_file(f"{TOKENIZER}/{name}", content)
            for file in filter(Path.is_file, self.origin.glob("*")):
                self._mirror.write_file(f"{ORIGIN}/{file.name}", file.read_bytes())

    def check(self, meta: Meta, place: str) -> list[Change]:
        """Return the changes of keys since a checkpoint at `place`, all of them allowed.

        What `data.path` and similar keys name is left to the fingerprint, if there is one.
        """
        changed = changes(self.config, meta["config"])
        if meta.get("fingerprint"):
            changed = [change for change in changed if change.key not in FINGERPRINTED]
        if problems := refusals(self.config, changed, place):
            refused = (change for change in changed if not is_allowed(self.config, change.key))
            advice = [] if all(map(may_grow, refused)) else [self.advice(place)]
            raise ConfigError(*problems, *advice)
        return changed

    def chat_date(self) -> str:
        """Return the date that the chat template of the run's earlier starts wrote; "" if none."""
        places = [self._recorded(self._steps.steps())]
        if self._mirror is not None:
            places.append(self._mirrored(self._mirror))
        sections = (meta["config"].get("data") or {} for meta in chain.from_iterable(places))
        return next(filter(None, (section.get("chat_date") for section in sections)), "")

    def keep_config(self, step: int) -> None:
        """Add the configuration after `step` to `config_history/`, unless the newest is equal."""
        text = self._yaml()
        with _explained(f"write to {self.config_history}"):
            self.config_history.mkdir(exist_ok=True)
            earlier = sorted(self.config_history.glob("[0-9]*-step-*.yml"))
            if not earlier or earlier[-1].read_bytes() != text:
                number = int(earlier[-1].name.partition("-")[0]) + 1 if earlier else 1
                write_atomically(self.config_history / f"{number:04}-step-{step}.yml", [text])

    def advice(self, place: str) -> Problem:
        """Return what to do about a checkpoint of another run."""
        both = f" and {self._mirror.url}" if self._mirror else ""
        return Problem(
            "run_name",
            f"{place} belongs to another configuration: choose another run_name or restore its "
            f"values. checkpoint.resume=never is not enough: to use this name again, delete "
            f"{self.root}{both}",
        )

    def _yaml(self) -> bytes:
        return to_yaml(self.config, derived=self._derived).encode()

    def _recorded(self, steps: list[int]) -> Iterator[Meta]:
        """Yield the metadata of readable checkpoints, newest first, then what `config.yml` says.

        `config.yml` is from the last start, which may have stopped before its first checkpoint.
        """
        yield from _metas(self._steps, steps)
        with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):  # lost or torn
            written = yaml.safe_load(self.config_file.read_text(encoding="utf-8"))
            if isinstance(written, Mapping):
                yield {"config": written}

    def _mirrored(self, mirror: Mirror) -> Iterator[Meta]:
        with explained(mirror.url, MIRROR):
            yield from _metas(mirror, mirror.steps())


@contextmanager
def _explained(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot {action}: {error.strerror}"
        raise ConfigError(Problem("output_dir", message)) from error


def _metas(store: StepStore, steps: Sequence[int]) -> Iterator[Meta]:
    for step in reversed(steps):
        with suppress(CheckpointDamaged, CheckpointUnreadable, LookupError, TypeError):
            meta = store.record(step).meta
            if isinstance(meta["config"], Mapping):
                yield meta


def _tokenizer_contents(data: DataConfig) -> dict[str, bytes]:
    files = tokenizer_files(data.tokenizer, data.cache_dir)
    contents = {file.name: file.read_bytes() for file in files}
    template = trained_template(data)
    if template is not None:
        contents[CHAT_TEMPLATE] = template.source.encode()
        # Names the tokens that the template may write, also for a SentencePiece model.
        for file in template_files(data.tokenizer, data.cache_dir):
            if file.name == TOKENIZER_CONFIG:
                contents[file.name] = file.read_bytes()
    return contents


def _replace_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    if contents:
        directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        write_atomically(directory / name, [content])
    for file in directory.iterdir() if directory.is_dir() else ():
        # Directories are of other programs, such as .ipynb_checkpoints.
        if file.name not in contents and not file.is_dir():
            file.unlink()
