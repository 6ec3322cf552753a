"""Fingerprints of data: what they notice, how they tell changes apart, how little they read."""

import json
import time
from dataclasses import asdict

import pytest
from helpers.hf_folder import write_byte_pairs
from tokenizers import Tokenizer, processors

from maxpipe.config import Config, ConfigError, replace
from maxpipe.data import fingerprint as module
from maxpipe.data.fingerprint import (
    APPENDED,
    CHANGED,
    FRAMED,
    REORDERED,
    SHORTENED,
    SourceFiles,
    data_digests,
    fingerprint_data,
)
from maxpipe.storage.local_files import RemoteFile


@pytest.fixture
def corpus(tmp_path):
    """Return a directory of three files of JSON lines."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    for name in "abc":
        lines = [json.dumps({"text": f"{name}{i}"}) for i in range(20)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture
def config(corpus, tmp_path):
    return replace(
        Config(),
        **{
            "data.source": "jsonl",
            "data.path": str(corpus),
            "data.cache_dir": str(tmp_path / "cache"),
        },
    )


def kinds(config, saved):
    return [(change.key, change.kind) for change in fingerprint_data(config).changes_since(saved)]


def recorded(config):
    """Return a fingerprint as it comes back from a checkpoint."""
    return json.loads(json.dumps(fingerprint_data(config).to_json()))


def test_fingerprint_notices_that_documents_begin_otherwise_than_in_earlier_versions(
    config, tmp_path
):
    for single, changes in [("$A", [FRAMED]), ("<s> $A", [])]:
        (folder := tmp_path / single).mkdir()
        path = write_byte_pairs(folder, "fox", ["<s>", "</s>"], size=300)
        stored = Tokenizer.from_file(str(path))
        special = [("<s>", 0), ("</s>", 1)]
        stored.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        stored.save(str(path))
        config = replace(config, **{"data.tokenizer": str(path)})
        saved = recorded(config)
        assert kinds(config, saved) == []
        del saved["frame"]
        assert kinds(config, saved) == [("data.tokenizer", kind) for kind in changes]
        chats = replace(config, **{"data.source": "chat", "data.chat_template": "chatml"})
        assert fingerprint_data(chats).frame is None


def test_fingerprint_needs_no_home(config, monkeypatch):
    saved = recorded(config)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as for a uid without an entry
    assert kinds(replace(config, **{"data.cache_dir": ""}), saved) == []


def test_fingerprint_of_the_same_data_has_no_changes_wherever_it_lies(config, corpus, tmp_path):
    saved = recorded(config)
    assert kinds(config, saved) == []
    corpus.rename(tmp_path / "moved")
    moved = replace(config, **{"data.path": str(tmp_path / "moved" / "*.jsonl")})
    assert kinds(moved, saved) == []
    assert data_digests(moved)["data.path"] == fingerprint_data(moved).digests()["data.path"]


def test_fingerprint_tells_appended_from_shortened_reordered_and_changed(config, corpus):
    saved = recorded(config)
    last = corpus / "c.jsonl"
    content = last.read_bytes()

    (corpus / "d.jsonl").write_text('{"text": "d"}\n')
    assert kinds(config, saved) == [("data.path", APPENDED)]
    (corpus / "d.jsonl").rename(corpus / "0.jsonl")
    assert kinds(config, saved) == [("data.path", CHANGED)]
    (corpus / "0.jsonl").unlink()

    last.write_bytes(content + b'{"text": "more"}\n')
    assert kinds(config, saved) == [("data.path", APPENDED)]
    last.write_bytes(content[:-20])
    assert kinds(config, saved) == [("data.path", CHANGED)]
    last.write_bytes(content)

    last.rename(corpus / "0.jsonl")
    assert kinds(config, saved) == [("data.path", REORDERED)]
    (corpus / "0.jsonl").unlink()
    assert kinds(config, saved) == [("data.path", SHORTENED)]
    last.write_bytes(content)
    assert kinds(config, saved) == []


def test_fingerprint_names_the_file_that_changed(config, corpus):
    saved = recorded(config)
    lines = (corpus / "b.jsonl").read_text().splitlines()
    (corpus / "b.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    (change,) = fingerprint_data(config).changes_since(saved)
    assert change.text == "b.jsonl has other contents"
    file = corpus / "c.jsonl"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:100])
    (corpus / "b.jsonl").write_text("\n".join(lines) + "\n")
    (change,) = fingerprint_data(config).changes_since(saved)
    assert change.text == f"c.jsonl is shorter: {size} -> 100 bytes"


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
    assert ("data.mixture", CHANGED) in kinds(replace(mixed, **{"data.mixture": other}), saved)
    assert ("data.mixture", CHANGED) in kinds(replace(mixed, **{"data.mixture": other[:1]}), saved)
    with_set = replace(config, **{"data.eval_path": str(corpus / "c.jsonl")})
    assert kinds(with_set, recorded(config)) == [("data.eval_path", CHANGED)]
    assert data_digests(with_set).keys() == {"data.path", "data.eval_path", "data.tokenizer"}


def test_fingerprint_notices_another_tokenizer_under_the_same_path(config, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("one")
    config = replace(config, **{"data.tokenizer": str(file)})
    saved = recorded(config)
    assert kinds(config, saved) == []
    assert kinds(replace(config, **{"data.tokenizer": f"hf:{tmp_path}"}), saved) == []
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert kinds(config, saved) == [("data.tokenizer", CHANGED)]
    (tmp_path / "tokenizer_config.json").unlink()
    file.write_text("two")
    assert kinds(config, saved) == [("data.tokenizer", CHANGED)]
    file.unlink()
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*cannot be read"):
        fingerprint_data(config)


def test_fingerprint_of_a_tokenizer_that_is_a_device_is_refused(config):
    """A pipe would be waited for, and /dev/zero never ends."""
    with pytest.raises(ConfigError, match=r"data\.tokenizer: /dev/null is not a regular file"):
        fingerprint_data(replace(config, **{"data.tokenizer": "/dev/null"}))


def test_fingerprint_of_an_object_store_is_of_sizes_and_entity_tags(config, monkeypatch):
    def store(tag):
        files = [RemoteFile("corpus/a.jsonl", 5, "1"), RemoteFile("corpus/b.jsonl", 5, tag)]
        monkeypatch.setattr(module, "list_remote", lambda url, suffixes: files)

    monkeypatch.setattr(module, "sampled_digest", lambda path, size: pytest.fail("was read"))
    config = replace(config, **{"data.path": "s3://bucket/corpus"})
    store("2")
    saved = recorded(config)
    assert kinds(config, saved) == []
    store("3")
    (change,) = fingerprint_data(config).changes_since(saved)
    assert change == ("data.path", CHANGED, "b.jsonl has other contents")


def test_fingerprint_of_token_files_includes_their_index(config, tmp_path):
    (tmp_path / "shard.bin").write_bytes(bytes(100))
    (tmp_path / "shard.idx.npy").write_bytes(b"one")
    config = replace(
        config, **{"data.source": "token_bin", "data.path": str(tmp_path / "shard.bin")}
    )
    saved = recorded(config)
    (tmp_path / "shard.idx.npy").write_bytes(b"two")
    assert kinds(config, saved) == [("data.path", CHANGED)]


def test_fingerprint_of_sources_without_a_path_is_stable():
    for source in ("python_stdlib", "synthetic"):
        config = replace(Config(), **{"data.source": source})
        assert kinds(config, recorded(config)) == []
        assert set(data_digests(config)) == {"data.source", "data.tokenizer"}


def test_fingerprint_of_many_files_is_quick_and_remembered(config, tmp_path, monkeypatch):
    directory = tmp_path / "many"
    directory.mkdir()
    for i in range(1000):
        (directory / f"{i:04}.jsonl").write_bytes(b'{"text": "%d"}\n' % i)
    config = replace(config, **{"data.path": str(directory)})
    began = time.perf_counter()
    saved = recorded(config)
    assert time.perf_counter() - began < 5  # 0.1 s on an idle core
    assert len(json.dumps(saved)) < 10_000
    with monkeypatch.context() as patch:
        patch.setattr(module, "sampled_digest", lambda path, size: pytest.fail("read again"))
        assert kinds(config, saved) == []
    assert [*asdict(fingerprint_data(config).train[0].fingerprint)["files"]]
    (directory / "0050.jsonl").write_bytes(b'{"text": "xx"}\n')  # its time is another
    assert kinds(config, saved) == [("data.path", CHANGED)]


def test_changes_since_something_else_is_a_type_or_key_error(config):
    for damage in [{}, {"data": 3}, {"data": [3], "eval": None, "tokenizer": 0}]:
        with pytest.raises((TypeError, KeyError)):
            fingerprint_data(config).changes_since(damage)


def test_fingerprint_notices_another_chat_template(corpus, tmp_path):
    talk = {"messages": [{"role": "assistant", "content": "a"}]}
    (corpus / "a.jsonl").write_text(json.dumps(talk))
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages }}")
    data = {"source": "chat", "path": str(corpus), "chat_template": str(template)}
    config = replace(Config(), **{f"data.{key}": value for key, value in data.items()})
    saved = recorded(config)
    assert kinds(config, saved) == []
    before = data_digests(config)
    template.write_text("{{ messages }}.")
    assert kinds(config, saved) == [("data.chat_template", CHANGED)]
    assert data_digests(config).keys() == before.keys()
    assert data_digests(config)["data.chat_template"] != before["data.chat_template"]


def test_fingerprint_of_an_earlier_version_had_no_chat_template(config):
    saved = recorded(config)
    del saved["chat_template"]
    assert kinds(config, saved) == []


def test_link_to_a_directory_of_the_data_leaves_its_fingerprint(tmp_path):
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    before = SourceFiles("text", str(tmp_path), 1.0, "").fingerprint.digest
    (tmp_path / "latest").symlink_to(tmp_path / "v2")
    assert SourceFiles("text", str(tmp_path), 1.0, "").fingerprint.digest == before
