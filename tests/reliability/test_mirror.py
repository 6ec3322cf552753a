"""Complete runs whose checkpoints are copied to an S3 server on this machine."""

import shutil
import sys
import time

import pytest
from helpers.runs import saved
from helpers.training_process import DATA_PARALLEL, command, run, train_here

from maxpipe.generate import __main__ as generate

MIRROR = "checkpoint.mirror=s3://runs"
STEPS = ("steps=4", "checkpoint.every=1", "data.source=python_stdlib")


@pytest.fixture
def bucket(s3):
    s3.create_bucket(Bucket="runs")
    yield s3
    for item in s3.list_objects_v2(Bucket="runs").get("Contents", []):
        s3.delete_object(Bucket="runs", Key=item["Key"])
    s3.delete_bucket(Bucket="runs")


def main(tmp_path, *words):
    return train_here(tmp_path, *STEPS, *words)


def keys(s3):
    return [item["Key"] for item in s3.list_objects_v2(Bucket="runs").get("Contents", [])]


@pytest.mark.slow
def test_train_after_lost_disk_continues_exactly(tmp_path, bucket, capsys):
    assert main(tmp_path / "whole") == 0
    code, output = run(
        tmp_path / "log", command(tmp_path / "lost", *DATA_PARALLEL, *STEPS, MIRROR, "stop_after=2")
    )
    assert code == 0, output
    assert {"base/config.yml", "base/checkpoints/1.json", "base/checkpoints/2.json"} <= set(
        keys(bucket)
    )
    shutil.rmtree(tmp_path / "lost")
    assert main(tmp_path / "lost", MIRROR, "seed=1") == 2
    assert (
        "seed: is 1, but the checkpoints in s3://runs/base/checkpoints were made with 0"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "lost").exists()
    assert main(tmp_path / "lost", MIRROR) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    ours, theirs = (saved(tmp_path / name / "base", 4) for name in ("lost", "whole"))
    assert {name: array.tobytes() for name, array in ours.items()} == {
        n: a.tobytes() for n, a in theirs.items()
    }
    for key in (key for key in keys(bucket) if key.startswith("base/checkpoints/4")):
        bucket.delete_object(Bucket="runs", Key=key)
    assert main(tmp_path / "lost", MIRROR) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert "base/checkpoints/4.json" in keys(bucket)
    shutil.rmtree(tmp_path / "lost")
    assert main(tmp_path / "lost", MIRROR, "checkpoint.resume=never") == 2
    assert "and s3://runs/base/checkpoints: 2, 3, 4" in capsys.readouterr().err
    assert generate.main(["s3://runs/base", "--prompt=def ", "--max-tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("def ")


class TestExitCode2:
    """Although something does not answer, each ends quickly."""

    @pytest.fixture
    def refused(self, tmp_path, capsys):

        def _refused(*words, directory=tmp_path):
            began = time.monotonic()
            assert main(directory, *words) == 2
            assert time.monotonic() - began < 30
            assert not (tmp_path / "base").exists()
            return capsys.readouterr().err

        return _refused

    def test_train_mirror_without_credentials_exits_with_2(self, refused, without_s3_keys):
        error = refused(MIRROR)
        assert "config error: checkpoint.mirror: s3://runs/base/checkpoints cannot be read" in error
        assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in error

    def test_train_missing_bucket_or_server_exits_with_2(self, refused, s3, monkeypatch):
        unwritable = "checkpoint.mirror: s3://runs/base/checkpoints cannot be written to"
        assert unwritable in refused(MIRROR)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert "checkpoint.mirror: s3://runs/base/checkpoints cannot be read" in refused(MIRROR)

    def test_train_missing_library_exits_with_2(self, refused, monkeypatch):
        known = pytest.importorskip("fsspec.registry")._registry
        for protocol, library in (("s3", "s3fs"), ("gs", "gcsfs")):
            monkeypatch.delitem(known, protocol, raising=False)
            monkeypatch.setitem(sys.modules, library, None)
            error = refused(f"checkpoint.mirror={protocol}://runs")
            assert f"checkpoint.mirror: needs {library}, " in error
            assert f"pip install -e '.[{protocol}]'" in error

    def test_train_mirror_or_output_dir_of_another_kind_exits_with_2(self, refused):
        for url in ("hdfs://runs", "/data", "s3://", "s3:/runs"):
            error = refused(f"checkpoint.mirror={url}")
            assert "is not a place such as s3://bucket/runs" in error
        error = refused(directory="s3://runs")
        assert "output_dir (command line): 's3://runs' is not a directory" in error
