"""JSON lines: one object per line, the document under "text"; may be compressed (.gz, .zst)."""

import json
import os
from functools import lru_cache

import numpy as np

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.files import GZIP, ZSTD, Spans, find_all, find_files, require_content, unpacked


class JsonLines:
    """The lines of some files, read one at a time through an index of their byte offsets.

    Args:
      paths: non-empty files. Each is read through once, here, for its index.
    """

    def __init__(self, paths: list[str]):
        self._paths = paths
        self._lines = Spans([_index_lines(path, *_version(path)) for path in paths])

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> str:
        """Raises ConfigError, naming file and line, if the line is no object with a string under "text"."""
        file, start, end = self._lines.locate(index)
        with open(self._paths[file], "rb") as stream:
            stream.seek(start)
            line = stream.read(end - start)
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError(f"the text is of type {type(text).__name__}")
            # An escaped lone surrogate is legal JSON that no tokenizer can encode.
            text.encode("utf-8")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._corrupt(file, start, f"{type(error).__name__}: {error}") from error
        return text

    def _corrupt(self, file: int, start: int, reason: str) -> ConfigError:
        path = self._paths[file]
        with open(path, "rb") as stream:
            number = stream.read(start).count(b"\n") + 1
        message = f'{path}:{number}: not a JSON object with a string under "text" ({reason})'
        return ConfigError(Problem("data.path", message))


def _version(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=1024)
def _index_lines(path: str, size: int, mtime_ns: int) -> np.ndarray:
    """Start and end of each line in bytes, int64 [lines, 2], blank lines left out."""
    content = np.memmap(path, np.uint8, mode="r")
    ends = np.append(find_all(content, ord("\n")), size)
    starts = np.append(0, ends[:-1] + 1)
    blank = ends == starts
    single = np.flatnonzero(ends - starts == 1)
    blank[single] = content[starts[single]] == ord("\r")
    return np.stack([starts, ends], axis=1)[~blank]


def build(config: DataConfig) -> JsonLines:
    """The lines of the files of `data.path` (in a directory: *.jsonl, *.jsonl.gz, *.jsonl.zst), files in sorted order.

    Raises:
      ConfigError: there is no file, or one holds no lines or is damaged.
    """
    endings = (".jsonl", ".jsonl" + GZIP, ".jsonl" + ZSTD)
    files = require_content(find_files(config.path, endings, config.cache_dir))
    return JsonLines(require_content([unpacked(path, config.cache_dir) for path in files]))
