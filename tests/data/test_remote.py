"""Object stores: an S3 server on this machine, and errors without credentials."""

import errno
import gzip
import time
from pathlib import Path

import pytest
from helpers.documents import all_of, opened

from maxpipe.config import ConfigError
from maxpipe.data.files import find_files

OBJECTS = {
    "corpus/b.jsonl": b'{"text": "second"}\n',
    "corpus/a.jsonl.gz": gzip.compress(b'{"text": "first"}\n{"text": "also first"}\n'),
    "corpus/deeper/c.jsonl": b'{"text": "third"}\n',
    "corpus/readme.txt": b"not of this format",
}


@pytest.fixture
def bucket(s3):
    s3.create_bucket(Bucket="maxpipe")
    for name, content in OBJECTS.items():
        s3.put_object(Bucket="maxpipe", Key=name, Body=content)
    return s3


def test_find_files_url_may_be_file_directory_or_glob(bucket, tmp_path):
    for path, names in [
        ("s3://maxpipe/corpus", ["a.jsonl.gz", "b.jsonl", "deeper/c.jsonl"]),
        ("s3://maxpipe/corpus/*.jsonl", ["b.jsonl"]),
        ("s3://maxpipe/corpus/b.jsonl, s3://maxpipe/corpus/readme.txt", ["b.jsonl", "readme.txt"]),
    ]:
        files = find_files(path, (".jsonl", ".jsonl.gz"), str(tmp_path / "cache"))
        contents = [OBJECTS[f"corpus/{name}"] for name in names]
        assert [Path(file).read_bytes() for file in files] == contents
        assert [Path(file).suffixes for file in files] == [Path(name).suffixes for name in names]


def test_source_reads_remote_files_and_copies_one_again_only_if_it_changed(bucket, tmp_path):
    def copy():
        (file,) = find_files("s3://maxpipe/corpus/b.jsonl", cache_dir=str(tmp_path))
        return file, Path(file).stat().st_mtime_ns

    first = copy()
    assert copy() == first
    changed = b'{"text": "changed"}\n'
    bucket.put_object(Bucket="maxpipe", Key="corpus/b.jsonl", Body=changed)
    assert Path(copy()[0]).read_bytes() == changed
    documents = opened("jsonl", "s3://maxpipe/corpus/", cache_dir=str(tmp_path / "cache"))
    assert all_of(documents) == ["first", "also first", "changed", "third"]


def test_files_that_cannot_be_fetched_are_named(bucket, monkeypatch, tmp_path):
    for path in ["s3://maxpipe/none", "s3://maxpipe/*.none", "s3://nowhere/a.jsonl"]:
        with pytest.raises(ConfigError, match=r"^data\.path: "):
            find_files(path, (".jsonl",), str(tmp_path))

    async def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr("s3fs.S3FileSystem._get_file", fail)
    with pytest.raises(ConfigError, match=r"^data\.path: s3://maxpipe/corpus/b\.jsonl .*No space"):
        find_files("s3://maxpipe/corpus/b.jsonl", cache_dir=str(tmp_path))


def test_fetch_without_credentials_or_server_fails_quickly(without_s3_keys, monkeypatch, tmp_path):
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    with pytest.raises(
        ConfigError, match=r"credentials.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ):
        find_files("s3://maxpipe/corpus", cache_dir=str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^data\.path: s3://maxpipe/corpus cannot be read"):
        find_files("s3://maxpipe/corpus", cache_dir=str(tmp_path))
    assert time.monotonic() - began < 30
