"""Digests of files; compressed files: unpacked completely, once, and again when they change."""

import bz2
import gzip
import lzma
import os
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.config.terminal import last_acts
from maxpipe.storage.local_files import (
    READ_LIMIT,
    local_copy,
    sampled_digest,
    unpacked,
    write_atomically,
)

zstandard = pytest.importorskip("zstandard", reason="needs the extra `data`")

CONTENT = b"".join(b"%d of many lines\n" % i for i in range(30_000))


def test_file_written_by_several_at_once_is_whole(tmp_path):
    """Processes of several containers may have equal ids, as threads of one process have."""
    path, texts = tmp_path / "config.yml", [bytes([letter]) * 1000 for letter in b"abcd"]

    def write(text):
        for i in range(20):
            write_atomically(path, [text[:500], text[500:]], durable=i % 2 == 0)
            assert path.read_bytes() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write, texts))
    assert [file.name for file in tmp_path.iterdir()] == ["config.yml"]


def test_file_whose_contents_cannot_be_made_stays_and_leaves_nothing(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")

    def pieces():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, pieces())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"old")]


COMPRESS = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
    ".bz2": bz2.compress,
    ".XZ": lzma.compress,
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_unpacked_joins_all_parts_and_names_a_damaged_file(tmp_path, ending):
    path, cache = tmp_path / f"a.jsonl{ending}", tmp_path / "cache"
    assert unpacked(str(tmp_path / "a.jsonl"), str(cache)) == str(tmp_path / "a.jsonl")
    packed = COMPRESS[ending](CONTENT)
    for damaged in (packed[:-20], b"plain text"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"^data\.path: {path} cannot be unpacked: "):
            unpacked(str(path), str(cache))
        assert list(cache.iterdir()) == []
    path.write_bytes(packed + COMPRESS[ending](b"the end"))
    copy = Path(unpacked(str(path), str(cache)))
    assert copy.suffix == ".jsonl"
    assert copy.read_bytes() == CONTENT + b"the end"


def test_unpacked_copies_again_only_if_changed(tmp_path, capsys):
    path, cache = tmp_path / "a.jsonl.gz", tmp_path / "cache"
    path.write_bytes(gzip.compress(b"first"))
    copy = unpacked(str(path), str(cache))
    said = capsys.readouterr().err
    assert re.fullmatch(rf"copying {path} to {cache}, which may .* GiB more \(data\.c.*\)\n", said)
    assert unpacked(str(path), str(cache)) == copy
    assert capsys.readouterr().err == ""
    path.write_bytes(gzip.compress(b"second"))
    assert Path(unpacked(str(path), str(cache))).read_bytes() == b"second"


def test_local_copy_that_a_signal_ends_leaves_nothing(tmp_path):
    def write(file):
        file.write(b"a part")
        for act in last_acts:  # which a signal's handler calls before it ends the process
            act()
        assert list(tmp_path.iterdir()) == []

    with pytest.raises(ConfigError):
        local_copy("a.gz", 0, ".jsonl", str(tmp_path), write)


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2", ".XZ"])
def test_unpacked_stops_at_the_limit_in_little_memory(tmp_path, ending):
    path, cache = tmp_path / f"a.jsonl{ending}", tmp_path / "cache"
    path.write_bytes(COMPRESS[ending](b"\n" * ((1 << 26) + 1)))
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"^data\.cache_limit: .*a\.jsonl.*0\.0625 GiB"):
        unpacked(str(path), str(cache), 1 << 26)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26
    assert list(cache.iterdir()) == []


def test_unpacked_counts_the_copies_that_are_there_and_names_an_unusable_cache(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(name.encode() * 60))
    cache = str(tmp_path / "cache")
    unpacked(str(tmp_path / "a.gz"), cache, 100)
    with pytest.raises(ConfigError, match=r"^data\.cache_limit: "):
        unpacked(str(tmp_path / "b.gz"), cache, 100)
    unpacked(str(tmp_path / "a.gz"), cache, 100)  # it is there already
    with pytest.raises(ConfigError, match=r"^data\.cache_dir: cannot keep a copy of "):
        unpacked(str(tmp_path / "a.gz"), str(tmp_path / "a.gz" / "cache"))


def test_sampled_digest_reads_both_ends_of_a_large_file_and_at_most_the_limit(
    tmp_path, monkeypatch
):
    file, lengths, pread = tmp_path / "large", [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: lengths.append(n) or pread(fd, n, at))
    digests = set()
    for place in (None, 0, 5, (1 << 20) - 1, (1 << 20) - (1 << 14)):
        content = bytearray(1 << 20)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        digests.add(sampled_digest(str(file), 1 << 20))
    assert len(digests) == 5
    assert sum(lengths) == 5 * READ_LIMIT
