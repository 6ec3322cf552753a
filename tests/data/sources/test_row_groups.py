"""Parquet files that are read as training comes to them, a row group at a time."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.documents import all_of, opened
from helpers.hub import COMMIT, hub_of
from helpers.runs import losses
from helpers.training_process import ONE_LAYER, train_here

from maxpipe.config import Config, load, replace, resolve
from maxpipe.config.errors import ConfigError
from maxpipe.data import block_order, row_groups
from maxpipe.data.block_order import BlockOrder
from maxpipe.data.check import SOUND, check
from maxpipe.data.documents import Blocks
from maxpipe.data.loader import make_loader
from maxpipe.storage import object_store
from maxpipe.training.phases import config_after, dealt, first_position

pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
pq = pytest.importorskip("pyarrow.parquet")


def write(directory, texts, rows=50, files=3):
    directory.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(np.array_split(np.array(texts, object), files)):
        table = pa.table({"id": range(len(part)), "text": pa.array(part, pa.string())})
        pq.write_table(table, directory / f"shard_{i:05}.parquet", row_group_size=rows)
    return directory


def texts_of(count):
    lengths = np.random.default_rng(0).lognormal(1.5, 1.2, count).astype(int)
    return [f"{i:x}:" + "x" * int(length) for i, length in enumerate(lengths)]


def config_of(path, batch=6, **data):
    values = {"source": "parquet", "path": str(path), "stream": True, "eval_fraction": 0.0}
    values |= {"global_batch_size": batch, "sequence_length": 64, **data}
    return replace(Config(), **{f"data.{key}": value for key, value in values.items()})


def take(loader, count):
    steps = [(next(loader), loader.state) for _ in range(count)]
    loader.close()
    return [batch for batch, _ in steps], [state for _, state in steps]


def test_stream_has_the_documents_and_the_split_of_the_copies(tmp_path):
    path = write(tmp_path / "corpus", [*texts_of(90), "", None])
    keys = {"cache_dir": str(tmp_path / "cache"), "eval_fraction": 0.1}
    for split in ("train", "eval"):
        copies, stream = (opened("parquet", path, split, stream=s, **keys) for s in (False, True))
        assert all_of(stream) == all_of(copies)


@pytest.mark.parametrize("large", [0, 300, 10_000])
def test_block_order_has_every_document_once_in_an_epoch(large, monkeypatch):
    monkeypatch.setattr(block_order, "OPEN", 1000)
    monkeypatch.setattr(block_order, "LEAST_OPEN", 4)
    for sizes in ([1], [30, 1, 70, 200, 9], [60] * 7):
        for rows in (1, 5, 64):
            order = BlockOrder(Blocks(np.array(sizes), large), 3, rows)
            epochs = [[order(e, i) for i in range(sum(sizes))] for e in range(2)]
            assert all(sorted(epoch) == [*range(sum(sizes))] for epoch in epochs)
            assert epochs[0] != epochs[1] or len(sizes) == 1


def test_block_order_of_few_documents_in_each_block_keeps_permutations(monkeypatch):
    monkeypatch.setattr(block_order, "index_shuffle", None)  # it takes milliseconds a document
    order = BlockOrder(Blocks(np.full(500, 10), 1), 3, rows=64)
    assert len({order(0, position) for position in range(2000)}) == 2000


@pytest.mark.parametrize("is_mixed", [False, True])
def test_loader_of_a_stream_resumes_from_every_state_in_other_processes(is_mixed, tmp_path):
    path = write(tmp_path / "corpus", texts_of(330))
    config = config_of(path, eval_fraction=0.1)
    if is_mixed:
        (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{c * 9}"}}\n' for c in "abcdefg"))
        files = {"parquet": str(path), "jsonl": f"{tmp_path}/a.jsonl"}
        mixture = [{"source": name, "path": file, "weight": 1} for name, file in files.items()]
        config = config_of("", mixture=mixture, eval_fraction=0.2)
    batches, states = take(make_loader(config, "train", range(6)), 24)
    assert states[-1][:, 0].min() >= 1, "the test should cross an epoch"
    for step in range(1, 23):
        rows = [range(6), range(3, 6), range(0, 6, 2), [5]][step % 4]
        resumed, later = take(make_loader(config, "train", rows, states[step - 1][rows]), 2)
        whole = [{name: x[rows] for name, x in batch.items()} for batch in batches[step:]]
        np.testing.assert_equal(resumed, whole[:2])
        np.testing.assert_equal(later, [state[rows] for state in states[step : step + 2]])
    config = replace(config, **{"data.num_workers": 2, "data.prefetch": 2})
    resumed, _ = take(make_loader(config, "train", range(6), states[5]), 3)
    np.testing.assert_equal(resumed, batches[6:9])


@pytest.mark.parametrize(("batch", "is_shared"), [(8, False), (16, True)])
def test_an_epoch_reads_row_groups_once_and_holds_few(batch, is_shared, tmp_path, monkeypatch):
    monkeypatch.setattr(block_order, "LEAST_OPEN", 8)
    monkeypatch.setattr(row_groups, "HELD", 20_000)  # of about 110,000 bytes
    monkeypatch.setattr(row_groups, "_HELD", row_groups._RowGroups())
    monkeypatch.setattr(row_groups, "_read_group", reads := Mock(wraps=row_groups._read_group))
    if is_shared:
        monkeypatch.setattr(block_order, "OPEN", 2500)  # four row groups
    path = write(tmp_path / "corpus", texts_of(6000), files=4)
    config = config_of(path, batch, sequence_length=128, prefetch=1)
    loader = make_loader(config, "train", range(batch))
    while loader.state[:, 0].min() < 1:
        next(loader)
        done = reads.call_count
    epochs = (loader.state[:, 0] + loader.state[:, 1] / 6000).mean()
    loader.close()
    assert len({call.args[:2] for call in reads.call_args_list}) == 120
    assert done < (2 * epochs * 120 if is_shared else epochs * 120 + 4 * 8)
    assert sum(size for size, _ in row_groups._HELD._held.values()) <= row_groups.HELD


@pytest.mark.parametrize("is_mixed", [False, True])
def test_row_groups_of_unequal_size_are_read_about_once(is_mixed, tmp_path, monkeypatch):
    monkeypatch.setattr("maxpipe.data.rows.ROUND", 50)  # half a row group
    monkeypatch.setattr(row_groups, "HELD", 16_000)
    monkeypatch.setattr(block_order, "OPEN", 8000)  # four large row groups, or nine of mean size
    monkeypatch.setattr(row_groups, "_HELD", cache := row_groups._RowGroups())
    monkeypatch.setattr(row_groups, "_read_group", reads := Mock(wraps=row_groups._read_group))
    texts = [f"{i:04}" * (3 + i % 3) for i in range(6120)]  # rows do not get far ahead of others
    path = write(tmp_path / "corpus", texts, rows=100, files=60)  # of 100 and 2
    config = config_of(path, 16, sequence_length=128, prefetch=1)
    if is_mixed:
        globs = [f"{path}/shard_000[{digits}]*" for digits in ("0-2", "3-5")]
        mixture = [{"source": "parquet", "path": glob, "weight": 1} for glob in globs]
        config = replace(config, **{"data.mixture": mixture, "data.path": ""})
    loader = make_loader(config, "train", range(16))
    while loader.state[:, 0].min() < 1:
        next(loader)
    epochs = (loader.state[:, 0] + loader.state[:, 1] / 6120).mean()
    loader.close()
    assert reads.call_count < 1.5 * epochs * 120
    assert all(size == read.result().nbytes for size, read in cache._held.values())


def test_replaced_file_and_missing_split_end_the_run_with_a_remedy(tmp_path):
    path = write(tmp_path / "corpus", texts_of(90))
    documents = opened("parquet", path, stream=True)
    write(path, texts_of(120))
    with pytest.raises(ConfigError, match="has changed since the start; start again"):
        documents[0]
    pytest.importorskip("datasets", reason="needs the extra `datasets`")
    with pytest.raises(ConfigError, match=r"has the splits train; data.stream reads"):
        opened("datasets", f"hf:{path}::train[:10%]", stream=True)


def test_closing_a_loader_does_not_wait_for_a_store(tmp_path, monkeypatch):
    path, fail = write(tmp_path / "corpus", texts_of(90)), Mock(side_effect=OSError("503"))
    monkeypatch.setattr(object_store, "WAITS", (20,))
    read = partial(object_store.patiently, fail, "s3://bucket/file", KeyError)
    monkeypatch.setattr(row_groups, "_read_group", lambda *_: read())
    loader = make_loader(config_of(path), "train", range(6))
    while not fail.called:
        time.sleep(0.1)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 10


def test_stream_from_a_store_reads_footers_once_and_then_ranges(s3, tmp_path, monkeypatch, capsys):
    s3.create_bucket(Bucket="stream")
    texts = ["é" * i * 100 for i in range(60)]
    for file in write(tmp_path / "corpus", texts).iterdir():
        s3.upload_file(str(file), "stream", f"sample/{file.name}")
    keys = {"stream": True, "cache_dir": str(tmp_path / "cache")}
    documents = opened("parquet", "s3://stream/sample", **keys)
    assert all_of(documents) == texts
    from s3fs.core import S3File

    fetched, failures, fetch_range = [], [1, 2], S3File._fetch_range

    def fetch(*words):
        if failures:
            raise OSError(f"503 Slow Down {failures.pop()}")
        fetched.append(words)
        return fetch_range(*words)

    monkeypatch.setattr(S3File, "_fetch_range", fetch)
    monkeypatch.setattr(object_store, "WAITS", (0, 0))
    row_groups._HELD = row_groups._RowGroups()
    assert opened("parquet", "s3://stream/sample", **keys)[59] == texts[59]
    assert len(fetched) == 1
    assert "shard_00002.parquet cannot be read, next attempt in 0 s: 503" in capsys.readouterr().err
    failures += [1, 2, 3]
    with pytest.raises(ConfigError, match=r"^data\.path: s3://stream/\S+ .* 503 Slow") as caught:
        documents[0]
    assert type(caught.value) is ConfigError  # no BadDocument: another start may read it
    assert documents[0] == texts[0]
    for copy in (tmp_path / "cache" / "footers").iterdir():
        copy.write_bytes(b"damaged")
    row_groups.footer.cache_clear()
    row_groups._HELD = row_groups._RowGroups()
    assert all_of(opened("parquet", "s3://stream/sample", **keys)) == texts


FILES = {"sample-10BT": [{"split": "train", "path": "shard_*"}], "lines": "lines.jsonl"}
CARD = [{"config_name": name, "data_files": files} for name, files in FILES.items()]
# The libraries read the hub's address when they are imported.
OF_HUB = """
import sys
from helpers.documents import all_of, opened
from maxpipe.config.errors import ConfigError
from maxpipe.data.fingerprint import DataConfig, SourceFiles

for part in sys.argv[2:]:
    keys = {"source": "datasets", "path": part, "stream": True, "cache_dir": sys.argv[1]}
    try:
        print(*all_of(opened(**keys)), SourceFiles(DataConfig(**keys)).fingerprint.last, sep="|")
    except ConfigError as error:
        print(error)
"""


def test_stream_from_the_hub_reads_ranges_of_one_configuration(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra `datasets`")
    path = write(tmp_path / "sample", texts_of(120), rows=20)
    files = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    files |= {
        "README.md": f"---\nconfigs: {json.dumps(CARD)}\n---\n".encode(),
        "lines.jsonl": b"{}\n",
    }
    name, ranges = "hf:org/name:sample-10BT", []
    with hub_of(files, ranges) as address:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}
        words = [str(tmp_path / "cache"), name, f"{name}:test", "hf:org/name:lines"]
        command = [sys.executable, "-c", OF_HUB, *words]
        lines = subprocess.check_output(command, env=environment, text=True).splitlines()
    assert lines[0].split("|")[:-1] == texts_of(120)
    assert f"name='{name}:train', size=0, digest='{COMMIT} " in lines[0]
    assert lines[1].endswith("has the splits train; data.stream reads *.parquet of a whole split")
    assert "lines.jsonl; data.stream reads *.parquet" in lines[2]
    assert sorted(ranges[:3]) == sorted(files)[-3:]
    assert len(ranges) == 3 + 6  # footers and row groups


def test_training_of_nanochats_and_finewebs_layout_resumes_to_the_bit(tmp_path, capsys):
    texts = [text * 20 for text in texts_of(200)]
    path = write(tmp_path / "fineweb" / "sample" / "10BT", texts).parents[1]
    words = ["data.stream=true", "data.source=parquet", f"data.path={path}", "eval.every=2"]
    words += [f"data.cache_dir={tmp_path}/cache", "checkpoint.every=2", "steps=4", *ONE_LAYER]
    assert train_here(tmp_path / "whole", *words) == 0
    for stop in ("stop_after=2", "stop_after=4"):
        assert train_here(tmp_path / "cut", *words, stop) == 0
    whole, cut = (losses(tmp_path / name / "base") for name in ("whole", "cut"))
    assert cut == whole != {}
    assert not (tmp_path / "cache").exists()
    assert check(load("configs/base.yml", words).config) == SOUND
    assert "train: 19" in capsys.readouterr().out
    write(path / "sample" / "10BT", texts[::-1])
    assert train_here(tmp_path / "cut", *words, "steps=6") == 2
    assert "data.path: is not what the checkpoints" in capsys.readouterr().err


def test_batches_that_grow_read_no_document_of_a_stream_twice(tmp_path):
    ramp = [[0, 2], [3, 4], [6, 8]]
    config = config_of(write(tmp_path / "corpus", texts_of(330)), batch=8, batch_ramp=ramp)
    config = resolve(replace(config, **{"pipeline.engine": "sequential"}), 1)
    position, found = first_position(config, 330), []
    for step in (0, 3, 6):
        now = config_after(config, step)
        rows = now.data.global_batch_size
        position = dealt(position, rows, 330) if step else position
        batches, states = take(make_loader(now, "train", range(rows), position), 3)
        position = states[-1]
        texts = np.concatenate([batch["targets"] for batch in batches], axis=1)
        found += re.findall(r"(?<=\n)[0-9a-f]+(?=:)", read(texts))
    assert position[:, 0].max() == 0, "the test should not reach the next epoch"
    assert len(found) == len(set(found)) > 150


def read(ids):
    # A row may begin within a document, even within its number.
    return " ".join("".join(chr(i) if i < 256 else "\n" for i in row) for row in ids)
