"""Compare what the processes of a run are about to run, before the first step.

Processes that differ in a learning rate or in their data would train to the end and leave a state
that no configuration describes. Those that differ in shapes would wait for each other in a
collective. So each posts a digest in the coordination service, which needs no device, and process 0
compares them.
"""

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.sections import Config
from maxpipe.devices import processes

# Keys that may differ: they change no result. `output_dir` is compared by what is in it.
PRIVATE_KEYS = ("output_dir", "data.cache_dir", "data.num_workers", "compile.cache_dir")

_VALUE_LENGTH = 80
_SHOWN_BEFORE = 20  # characters before the first difference
_PROCESSES_SHOWN = 4
_calls = itertools.count()


def check_agreement(config: Config, contents: Mapping[str, str]) -> None:
    """Compare configuration and `contents` over several processes; all of them call this.

    Args:
      config: this process's configuration, before or after values are derived.
      contents: name -> digest or version of what a run depends on besides its configuration. If a
        name is a configuration key, such as one of a path, the digest is compared instead of its
        value.

    Raises:
      ConfigError: processes differ; one problem per key or name, the same in every process.
    """
    texts = {key: str(get(config, key)) for key in OPTIONS if key not in PRIVATE_KEYS}
    agree_on(texts | dict(contents))


def agree_on(texts: Mapping[str, str]) -> None:
    """Compare texts over several processes, without using the devices; all of them call this.

    Args:
      texts: texts to compare, by configuration key or other name.

    Raises:
      ConfigError: processes differ; one problem per name, the same in every process.
    """
    digest = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()
    # The number of this call, the same in all processes: a key of the store is written once.
    call, index = next(_calls), processes.index()
    verdict = _key(call, "verdict", 0)
    if index == 0:
        differences = _differences(call, texts, digest)
        processes.post(verdict, json.dumps(differences))
    else:
        # Texts first: process 0 may read them as soon as it has seen the digest.
        processes.post(_key(call, "texts", index), json.dumps(dict(texts)))
        processes.post(_key(call, "digest", index), digest)
        differences = json.loads(processes.read(verdict))
    if differences:
        raise ConfigError(*(Problem(key, message) for key, message in differences))


def source_digest() -> str:
    """Return a digest of the package's code, 16 hexadecimal digits; any line may change a run."""
    return _source_digest(Path(__file__).parents[1])


@cache
def _source_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _differences(call: int, texts: Mapping[str, str], digest: str) -> list[tuple[str, str]]:
    """Return (key, message) of everything in which a process differs from this one, process 0."""
    theirs = {
        index: processes.read(_key(call, "digest", index)) for index in range(1, processes.count())
    }
    others = {
        index: json.loads(processes.read(_key(call, "texts", index)))
        for index, other in theirs.items()
        if other != digest
    }
    same = [0, *(index for index, other in theirs.items() if other == digest)]
    return compare({0: dict(texts)} | others, same)


def compare(
    texts: Mapping[int, Mapping[str, str]], same: Sequence[int] = (0,)
) -> list[tuple[str, str]]:
    """Return (key, message) of each key whose texts differ.

    Args:
      texts: index of a process -> key -> text; process 0 is one of them.
      same: indices of the processes that have process 0's texts.
    """
    differences = []
    for key in sorted(set().union(*texts.values())):
        holders: dict[str, list[int]] = defaultdict(list)
        for index, text_of in texts.items():
            holders[text_of.get(key, "missing")] += same if index == 0 else [index]
        if len(holders) > 1:
            # Long texts are cut around their first difference.
            columns = zip(*holders, strict=False)
            first = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))
            start = first - _SHOWN_BEFORE if first > _VALUE_LENGTH - _SHOWN_BEFORE else 0
            sides = "; ".join(f"{_cut(text, start)} in {_named(p)}" for text, p in holders.items())
            remedy = "start all processes with the same command, code and data"
            differences.append((key, f"the processes of this run differ: {sides}; {remedy}"))
    return differences


def _cut(text: str, start: int) -> str:
    stop = start + _VALUE_LENGTH
    return f"{'…' * (start > 0)}{text[start:stop]}{'…' * (stop < len(text))}"


def _named(indices: Sequence[int]) -> str:
    """Name processes in words, such as "processes 0, 1, 2, 3 and 12 more"."""
    shown = ", ".join(map(str, sorted(indices)[:_PROCESSES_SHOWN]))
    more = len(indices) - _PROCESSES_SHOWN
    return f"process{'es' if len(indices) > 1 else ''} {shown}" + (
        f" and {more} more" if more > 0 else ""
    )


def _key(call: int, what: str, index: int) -> str:
    return f"maxpipe/agreement/{call}/{what}/{index}"
