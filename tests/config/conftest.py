"""A small base file and shorthands for loading and for the problems of a bad config."""

import re

import pytest

from maxpipe.config import ConfigError, catalog, load, notes, resolve

BASE = """\
run_name: test
steps: 100
model:
  num_layers: 8
  embed_dim: 64
data:
  global_batch_size: 16
mesh:
  ici:
    stage: 2
    fsdp: 2
"""


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> path of a YAML file."""

    def _write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return _write


@pytest.fixture
def base(write):
    """Path of a file for four devices: two stages, two-way FSDP, eight layers, a batch of 16."""
    return write("base.yml", BASE)


@pytest.fixture
def resolved(base):
    """resolved("key=value", ..., devices=4, slices=1) -> resolved config."""

    def _resolved(*words, devices=4, slices=1):
        return resolve(load(base, words), devices, slices)

    return _resolved


@pytest.fixture
def noted(base):
    """noted("key=value", ...) -> the lines that a start prints about it."""

    def _noted(*words):
        loaded = load(base, words)
        return notes(resolve(loaded, 4), loaded)

    return _noted


@pytest.fixture
def problems(base):
    """problems("key=value", ..., devices=4, slices=1) -> {key: message} of what is refused."""

    def _problems(*words, devices=4, slices=1):
        try:
            resolve(load(base, words), devices, slices)
        except ConfigError as error:
            return {problem.key: problem.message for problem in error.problems}
        return {}

    return _problems


@pytest.fixture
def add(monkeypatch):
    """add("SCHEDULES", name, entry): an entry that only this test has."""
    return lambda table, name, entry: monkeypatch.setitem(getattr(catalog, table), name, entry)


@pytest.fixture
def unlike(problems):
    """unlike({"key=value ...": (key, *parts of the message)}) -> the refusals that differ.

    Or unlike("key=value ... -> key: part | part") with a line each, whose continuation is indented.
    With `alone`, a refusal of another key as well differs, too.
    """

    def _unlike(table, alone=False):
        if isinstance(table, str):
            rows = [line.split(" -> ") for line in re.sub(r"\n +", " ", table).splitlines()]
            table = {words: re.split(r": | \| ", expected) for words, expected in rows}
        refusals = {words: problems(*words.split()) for words in table}
        return {
            words: refusals[words]
            for words, (key, *parts) in table.items()
            if not all(part in refusals[words].get(key, "") for part in parts)
            or (alone and list(refusals[words]) != [key])
        }

    return _unlike
