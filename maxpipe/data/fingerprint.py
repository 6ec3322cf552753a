"""Fingerprint a run's data and tokenizer: what a checkpoint says it was trained on.

A source is described by its files in the order in which they are read: names, sizes, and a digest
of at most 64 KiB of each (both ends and samples between them). Files of an object store
are described by their entity tags. A change of a large file that keeps its size and touches none of
the samples goes unnoticed. Imports no JAX.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import attribute_of
from maxpipe.config.model_places import SCHEME
from maxpipe.config.sections import Config, DataConfig
from maxpipe.data.chat_template import trained_template
from maxpipe.data.documents import each_source
from maxpipe.data.files import full_names, local_files, parts_of, path_error, sorted_parts
from maxpipe.data.tokenizers import (
    SPECIAL_TOKENS_MAP,
    Frame,
    frame_of,
    load_tokenizer,
    tokenizer_files,
)
from maxpipe.storage.local_files import each_once, list_remote, sampled_digest
from maxpipe.storage.object_store import is_remote
from maxpipe.storage.records import shaped

MOST_READ = 4096  # files read per source; of more files every n-th is read, and all sizes count
NAMED = 64  # files whose names a fingerprint lists, for messages

APPENDED, CHANGED, FRAMED = "appended", "changed", "other documents"


@dataclass(frozen=True)
class File:
    """A file of a source."""

    name: str  # without directory
    size: int  # bytes
    digest: str  # of its content, or its entity tag; "" if it was not read


@dataclass(frozen=True)
class SourceFingerprint:
    """The files of one source as a checkpoint records them."""

    source: str
    weight: float  # share of the documents or tokens, 1 without a mixture
    count: int
    size: int  # bytes of all files
    digest: str  # of all files in order
    head: str  # digest of all but the last
    last: File | None
    files: tuple[File, ...]  # the first `NAMED`


class DataChange(NamedTuple):
    """A difference between a checkpoint's data and this start's: the key that names the data,
    `APPENDED`, `CHANGED` or `FRAMED`, and a description for users.
    """

    key: str
    kind: str
    text: str


class SourceFiles:
    """The files of a source as they are now; raises ConfigError if one cannot be read, or a store
    does not answer.
    """

    def __init__(self, data: DataConfig, weight: float = 1.0):
        self._files = _list_files(data)
        self._sampled = cache(_sampled)
        count = len(self._files)
        self.fingerprint = SourceFingerprint(
            source=data.source,
            weight=weight,
            count=count,
            size=sum(file.size for file, _ in self._files),
            digest=self._digest_of(count),
            head=self._digest_of(count - 1),
            last=self._file(count - 1, count) if count else None,
            files=tuple(self._file(i, count) for i in range(min(count, NAMED))),
        )

    def change_since(self, saved: SourceFingerprint) -> tuple[str, str] | None:
        """Return kind and description of the difference from a saved fingerprint; None if equal."""
        ours = self.fingerprint
        if (ours.source, ours.weight) != (saved.source, saved.weight):
            before = f"{saved.weight:.3g} of {saved.source}"
            return CHANGED, f"{before} has become {ours.weight:.3g} of {ours.source}"
        if ours.digest == saved.digest:
            return None
        if not SOURCES[ours.source].needs_path:
            return CHANGED, f"{ours.source} has other documents here, as with another Python"
        more = ours.count - saved.count
        if more > 0 and self._digest_of(saved.count) == saved.digest:
            return APPENDED, f"{_number(more)} added after the {_number(saved.count)} of then"
        if more >= 0 and saved.last is not None and self._has_grown(saved, saved.last):
            return APPENDED, f"{saved.last.name} has grown at its end, nothing before it differs"
        if max(ours.count, saved.count) <= NAMED:
            return CHANGED, _differences(saved.files, ours.files)
        then = f"{_number(saved.count)} of {saved.size:,} bytes"
        return CHANGED, f"{then} then, {_number(ours.count)} of {ours.size:,} bytes now"

    def _has_grown(self, saved: SourceFingerprint, last: File) -> bool:
        """Return whether only the last saved file differs, and begins with its saved content."""
        file, path = self._files[saved.count - 1]
        if not (path and last.digest and file.name == last.name and file.size > last.size):
            return False
        is_same_before = self._digest_of(saved.count - 1) == saved.head
        return is_same_before and self._sampled(path, last.size) == last.digest

    def _digest_of(self, count: int) -> str:
        """Return the digest of the first `count` files, as if there were no others."""
        files = (self._file(i, count) for i in range(count))
        return _digest("".join(f"{file.name}\0{file.size}\0{file.digest}\n" for file in files))

    def _file(self, index: int, count: int) -> File:
        """Return a file as a fingerprint of `count` files describes it."""
        file, path = self._files[index]
        stride = -(-count // MOST_READ)
        if not path or (index % stride and index != count - 1):
            return file
        return replace(file, digest=self._sampled(path, file.size))


@dataclass(frozen=True)
class DataFingerprint:
    """What a run reads: its sources, its validation set, and its tokenizer."""

    key: str  # names the sources: `data.path`, `data.mixture` or `data.source`
    train: tuple[SourceFiles, ...]
    eval: SourceFiles | None  # `data.eval_path`
    tokenizer: str  # digest of its files, or its name
    chat_template: str  # digest of the template of conversations; "" if there are none
    frame: Frame | None = None  # of documents; None if there are only conversations

    def digests(self) -> dict[str, str]:
        """Return a digest for each key that names data or the tokenizer; processes with the same
        digests read the same documents with the same tokenizer, wherever the files are.
        """
        digests = {self.key: _of_sources(self.train), "data.tokenizer": self.tokenizer}
        if self.eval is not None:
            digests["data.eval_path"] = _of_sources([self.eval])
        if self.chat_template:
            digests["data.chat_template"] = self.chat_template
        return digests

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint as a checkpoint's meta holds it."""
        return {
            "data": [asdict(files.fingerprint) for files in self.train],
            "eval": asdict(self.eval.fingerprint) if self.eval else None,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "frame": self.frame,
        }

    def changes_since(self, saved: Mapping[str, Any]) -> list[DataChange]:
        """Return what differs from the `to_json` of a checkpoint; raises TypeError, ValueError or
        KeyError if `saved` is something else.
        """
        return [*self._sources_since(saved), *self._tokens_since(saved)]

    def _sources_since(self, saved: Mapping[str, Any]) -> Iterator[DataChange]:
        then = [shaped(source, SourceFingerprint) for source in saved["data"]]
        if len(then) != len(self.train):
            text = f"{len(then)} sources then, {len(self.train)} now"
            yield DataChange(self.key, CHANGED, text)
        pairs = [(self.key, *pair) for pair in zip(self.train, then, strict=False)]
        if bool(saved["eval"]) != bool(self.eval):
            text = "a validation set of its own now" if self.eval else "no validation set any more"
            yield DataChange("data.eval_path", CHANGED, text)
        elif self.eval:
            pairs.append(("data.eval_path", self.eval, shaped(saved["eval"], SourceFingerprint)))
        for key, files, before in pairs:
            if change := files.change_since(before):
                yield DataChange(key, *change)

    def _tokens_since(self, saved: Mapping[str, Any]) -> Iterator[DataChange]:
        earlier = saved.get("frame")  # of documents, if there are any
        if saved["tokenizer"] != self.tokenizer:
            text = f"its files have digest {self.tokenizer}, then {saved['tokenizer']}"
            yield DataChange("data.tokenizer", CHANGED, text)
        elif self.frame and earlier and Frame(*earlier) != self.frame:
            begin, end = earlier
            text = (
                f"ids {begin} before and {end} after a document have become "
                f"{self.frame.begin} and {self.frame.end}"
            )
            yield DataChange("data.tokenizer", FRAMED, text)
        template = saved.get("chat_template", "")  # earlier versions had no conversations
        if template != self.chat_template:
            text = f"the template has digest {self.chat_template!r}, then {template!r}"
            yield DataChange("data.chat_template", CHANGED, text)


def fingerprint_data(config: Config) -> DataFingerprint:
    """Return the fingerprint of the data and the tokenizer that a configuration names."""
    data = config.data
    key = "data.path" if SOURCES[data.source].needs_path else "data.source"
    if data.mixture:
        key = "data.mixture"
    weights = [entry["weight"] for entry in data.mixture] or [1.0]
    train = tuple(
        SourceFiles(source, weight / sum(weights))
        for source, weight in zip(each_source(data), weights, strict=True)
    )
    evaluation = SourceFiles(replace(data, path=data.eval_path)) if data.eval_path else None
    tokenizer = tokenizer_digest(data.tokenizer, data.cache_dir)
    chat_template = ""
    if template := trained_template(data):
        chat_template = _digest(json.dumps([template.source, sorted(template.special_tokens)]))
    frame = None
    if not all(SOURCES[files.fingerprint.source].is_chat for files in train):
        with suppress(ConfigError):  # the loader refuses it
            frame = frame_of(load_tokenizer(data.tokenizer, data.cache_dir))
    return DataFingerprint(key, train, evaluation, tokenizer, chat_template, frame)


def tokenizer_digest(name_or_path: str, cache_dir: str = "") -> str:
    """Return a digest of a tokenizer's files, or its name if it has none; arguments are those of
    `load_tokenizer`. Raises ConfigError if a file cannot be read.
    """
    files = tokenizer_files(name_or_path, cache_dir)
    if not files:
        return name_or_path
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        # What special_tokens_map.json names shows in the recorded frame; earlier versions did not
        # read it, and their runs go on.
        if file.name == SPECIAL_TOKENS_MAP:
            continue
        try:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise ConfigError(Problem("data.tokenizer", f"{file} cannot be read")) from error
    return digest.hexdigest()


def _list_files(data: DataConfig) -> list[tuple[File, str]]:
    """Return the files of a source in its order, and the local path of each, "" in a store."""
    facts = SOURCES[data.source]
    if not facts.needs_path:
        return [(File(attribute_of(facts.version)(), 0, ""), "")] if facts.version else []
    local: set[str] = set()
    remote: list[File] = []
    # Sources that name what an entry's rows come from open the entries in sorted order.
    path = full_names(data.path, facts)
    for part in sorted_parts(path) if facts.version else parts_of(path):
        contents = attribute_of(facts.version)(part, data) if facts.version else None
        if contents:
            files, name, digest = contents
            local.update(files)
            remote += [File(name, 0, digest)] if name else []
        elif is_remote(part):
            remote += [
                File(Path(file.name).name, file.size, file.etag)
                for file in list_remote(part, facts.suffixes)
            ]
        else:
            local.update(local_files(part, facts.suffixes))
    local = set(each_once(local))
    if facts.companion:
        companions = {str(Path(file).with_suffix(facts.companion)) for file in local}
        local |= {file for file in companions if os.path.isfile(file)}
    listed = [(File(Path(name).name, os.path.getsize(name), ""), name) for name in sorted(local)]
    return listed + [(file, "") for file in dict.fromkeys(remote)]


def _of_sources(sources: Sequence[SourceFiles]) -> str:
    prints = [files.fingerprint for files in sources]
    return _digest("\n".join(f"{p.source} {p.weight!r} {p.digest}" for p in prints))


def _digest(text: str) -> str:
    content = text.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _sampled(path: str, size: int) -> str:
    try:
        return sampled_digest(path, size)
    except OSError as error:
        raise path_error(f"{path} cannot be read: {error.strerror}") from error


def _differences(before: Sequence[File], now: Sequence[File]) -> str:
    """Describe what differs between the files of two fingerprints."""
    then, ours = ({file.name: file for file in files} for files in (before, now))
    changed = [name for name in {**then, **ours} if then.get(name) != ours.get(name)]
    for name in changed:
        if name.startswith(SCHEME) and name in then and name in ours:
            place, rest = name.partition(":")[2].split(":", 1)
            old, new = (files[name].digest.partition(" ")[0] for files in (then, ours))
            return f"{name} has commit {new} now; {SCHEME}{place}@{old}:{rest} is that of then"
    shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    return f"{shown or 'files of the same name'}: new, gone, or with other contents"


def _number(count: int) -> str:
    return f"{count:,} file" + ("" if count == 1 else "s")
