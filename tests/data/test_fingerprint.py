"""Fingerprints of data: what they notice, how they tell changes apart, how little they read."""

import json

import pytest
from helpers.hf_folder import write_byte_pairs

from maxpipe.config import Config, replace
from maxpipe.data import fingerprint as module
from maxpipe.data.fingerprint import APPENDED, CHANGED, FRAMED, fingerprint_data
from maxpipe.storage.local_files import RemoteFile


@pytest.fixture
def corpus(tmp_path):
    directory = tmp_path / "corpus"
    directory.mkdir()
    for name in "abc":
        lines = [json.dumps({"text": f"{name}{i}"}) for i in range(20)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def config(corpus, tmp_path):
    cache = {"data.cache_dir": str(tmp_path / "cache")}
    return replace(Config(), **{"data.source": "jsonl", "data.path": str(corpus)}, **cache)


def kinds(config, saved):
    return [(change.key, change.kind) for change in fingerprint_data(config).changes_since(saved)]


def recorded(config):
    saved = json.loads(json.dumps(fingerprint_data(config).to_json()))
    assert kinds(config, saved) == []
    return saved


def test_fingerprint_notices_that_documents_begin_otherwise(config, tmp_path):
    path = write_byte_pairs(tmp_path, "fox", ["<s>", "</s>"], size=300)
    config = replace(config, **{"data.tokenizer": str(path)})
    saved = recorded(config)
    saved["frame"] = [[], 1]
    assert kinds(config, saved) == [("data.tokenizer", FRAMED)]
    del saved["frame"]  # as earlier versions recorded
    assert kinds(config, saved) == []
    chats = replace(config, **{"data.source": "chat", "data.chat_template": "chatml"})
    assert fingerprint_data(chats).frame is None


def test_fingerprint_of_the_same_data_has_no_changes_wherever_it_lies(config, corpus, tmp_path):
    saved = recorded(config)
    corpus.rename(tmp_path / "moved")
    (tmp_path / "moved" / "latest").symlink_to(tmp_path / "moved")
    for path in (tmp_path / "moved" / "*.jsonl", tmp_path / "moved"):
        assert kinds(replace(config, **{"data.path": str(path)}), saved) == []
    for source in ("python_stdlib", "synthetic"):
        without_path = replace(Config(), **{"data.source": source})
        recorded(without_path)
        digests = fingerprint_data(without_path).digests()
        assert digests.keys() == {"data.source", "data.tokenizer"}


def test_fingerprint_tells_appended_from_other_changes_and_names_the_file(config, corpus):
    saved = recorded(config)
    del saved["chat_template"]  # as earlier versions recorded
    whole = {name: (corpus / f"{name}.jsonl").read_bytes() for name in "abc"}
    for files, kind, text in [
        ({}, None, ""),
        ({"d": b"d"}, APPENDED, "1 file added after the 3 files of then"),
        ({"c": whole["c"] + b"more"}, APPENDED, "c.jsonl has grown at its end, nothing before it"),
        ({"0": b"d"}, CHANGED, "0.jsonl: new, gone, or with other contents"),
        ({"c": whole["c"][:-20]}, CHANGED, "c.jsonl: new"),
        ({"c": None, "0": whole["c"]}, CHANGED, "c.jsonl, 0.jsonl: new"),
        ({"c": None}, CHANGED, "c.jsonl: new"),
        ({"b": whole["b"][::-1], "c": whole["c"] + b"more"}, CHANGED, "b.jsonl, c.jsonl: new"),
    ]:
        for file in corpus.iterdir():
            file.unlink()
        for name, content in (whole | files).items():
            if content is not None:
                (corpus / f"{name}.jsonl").write_bytes(content)
        assert kinds(config, saved) == [("data.path", kind)] * bool(kind)
        changes = fingerprint_data(config).changes_since(saved)
        assert all(change.text.startswith(text) for change in changes)


def test_fingerprint_notices_weights_sources_and_the_validation_set(config, corpus):
    entries = [
        {"source": "jsonl", "path": str(corpus / "a.jsonl"), "weight": 1.0},
        {"source": "jsonl", "path": str(corpus / "b.jsonl"), "weight": 3.0},
    ]
    mixed = replace(config, **{"data.path": "", "data.mixture": entries})
    saved = recorded(mixed)
    scaled = [{**entry, "weight": 2 * entry["weight"]} for entry in entries]
    assert kinds(replace(mixed, **{"data.mixture": scaled}), saved) == []
    other = [entries[0], {**entries[1], "weight": 4.0}]
    for mixture in (other, other[:1]):
        changed = kinds(replace(mixed, **{"data.mixture": mixture}), saved)
        assert ("data.mixture", CHANGED) in changed
    with_set = replace(config, **{"data.eval_path": str(corpus / "c.jsonl")})
    assert kinds(with_set, recorded(config)) == [("data.eval_path", CHANGED)]
    assert kinds(config, recorded(with_set)) == [("data.eval_path", CHANGED)]
    digests = fingerprint_data(with_set).digests()
    assert digests.keys() == {"data.path", "data.eval_path", "data.tokenizer"}


def test_fingerprint_notices_another_tokenizer_or_index_under_the_same_path(config, tmp_path):
    file, names = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    file.write_text("one")
    config = replace(config, **{"data.tokenizer": str(file)})
    saved = recorded(config)
    assert kinds(replace(config, **{"data.tokenizer": f"hf:{tmp_path}"}), saved) == []
    names.write_text("{}")
    assert kinds(config, saved) == [("data.tokenizer", CHANGED)]
    names.unlink()
    file.write_text("two")
    assert kinds(config, saved) == [("data.tokenizer", CHANGED)]
    index = tmp_path / "shard.idx.npy"  # of token files, which belongs to them
    (tmp_path / "shard.bin").write_bytes(bytes(100))
    index.write_bytes(b"one")
    data = {"data.source": "token_bin", "data.path": str(tmp_path / "shard.bin")}
    saved = recorded(config := replace(config, **data))
    index.write_bytes(b"two")
    assert kinds(config, saved) == [("data.path", CHANGED)]
    index = tmp_path / "shard.idx"  # of Megatron-LM, by whichever name
    index.write_bytes(b"one")
    saved = recorded(config := replace(config, **{"data.source": "megatron"}))
    for name in ("shard", "shard.idx", "*"):
        assert kinds(replace(config, **{"data.path": f"{tmp_path}/{name}"}), saved) == []
    index.write_bytes(b"two")
    assert kinds(config, saved) == [("data.path", CHANGED)]


def test_fingerprint_notices_another_chat_template(corpus, tmp_path):
    (corpus / "a.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}')
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    data = {"source": "chat", "path": str(corpus), "chat_template": str(template)}
    config = replace(Config(), **{f"data.{key}": value for key, value in data.items()})
    saved, before = recorded(config), fingerprint_data(config).digests()
    template.write_text("{{ messages }}.")
    assert kinds(config, saved) == [("data.chat_template", CHANGED)]
    after = fingerprint_data(config).digests()
    assert {key for key in before if before[key] != after[key]} == {"data.chat_template"}


def test_fingerprint_of_an_object_store_is_of_sizes_and_entity_tags(config, monkeypatch):
    def store(tag):
        files = [RemoteFile("corpus/a.jsonl", 5, "1"), RemoteFile("corpus/b.jsonl", 5, tag)]
        monkeypatch.setattr(module, "list_remote", lambda url, suffixes: files)

    monkeypatch.setattr(module, "sampled_digest", lambda path, size: pytest.fail("was read"))
    config = replace(config, **{"data.path": "s3://bucket/corpus"})
    store("2")
    saved = recorded(config)
    store("3")
    (change,) = fingerprint_data(config).changes_since(saved)
    assert change == ("data.path", CHANGED, "b.jsonl: new, gone, or with other contents")


def test_fingerprint_of_many_files_is_small_and_reads_a_file_once(config, tmp_path, monkeypatch):
    directory = tmp_path / "many"
    directory.mkdir()
    for i in range(300):
        (directory / f"{i:04}.jsonl").write_bytes(b'{"text": "%d"}\n' % i)
    config = replace(config, **{"data.path": str(directory)})
    read, digest = [], module.sampled_digest
    monkeypatch.setattr(
        module, "sampled_digest", lambda path, size: read.append(path) or digest(path, size)
    )
    saved = fingerprint_data(config).to_json()
    assert len(read) == 300
    assert len(json.dumps(saved)) < 10_000
    (directory / "0250.jsonl").write_bytes(b'{"text": "xxx"}\n')
    assert kinds(config, json.loads(json.dumps(saved))) == [("data.path", CHANGED)]
    monkeypatch.setattr(module, "MOST_READ", 100)
    fingerprint_data(config)
    assert len(read) == 702  # also the last file, and the one before, which ends `head`
