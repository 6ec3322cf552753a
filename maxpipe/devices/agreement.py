"""Compare what the processes of a run are about to run, before the first step.

Processes that differ in a learning rate or in their data would train to the end and leave a state
that no configuration describes. Those that differ in shapes would wait for each other in a
collective. So each posts its texts in the coordination service, which needs no device, and process
0 compares them.
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
_SHOWN_BEFORE = 20  # characters before the first difference of long texts
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
    """Compare texts by key over several processes, without using the devices; all call this;
    raises ConfigError if processes differ; one problem per key, the same in every process.
    """
    # The number of this call, the same in all processes: a key of the store is written once.
    call, index = next(_calls), processes.index()
    if index == 0:
        others = {i: json.loads(processes.read(_key(call, i))) for i in range(1, processes.count())}
        differences = compare({0: texts} | others)
        processes.post(_key(call, 0), json.dumps(differences))
    else:
        processes.post(_key(call, index), json.dumps(dict(texts)))
        differences = json.loads(processes.read(_key(call, 0)))
    if differences:
        raise ConfigError(*(Problem(key, message) for key, message in differences))


@cache
def source_digest(package: Path = Path(__file__).parents[1]) -> str:
    """Return a digest of the package's code, 16 hexadecimal digits; any line may change a run."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compare(texts: Mapping[int, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Return (key, message) of each key that differs, given index of a process -> key -> text."""
    differences = []
    for key in sorted(set().union(*texts.values())):
        holders: dict[str, list[int]] = defaultdict(list)
        for index, text_of in texts.items():
            holders[text_of.get(key, "missing")].append(index)
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
    return f"process{'es' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def _key(call: int, index: int) -> str:
    return f"maxpipe/agreement/{call}/{index}"
