"""Data sets of Hugging Face's library: saved ones, files, those of the hub."""

import json
import shutil

import pytest
from helpers.documents import all_of, opened

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.fingerprint import CHANGED, SourceFiles

TEXTS = [f"text {i} " * (i % 7 + 1) for i in range(40)]


@pytest.fixture(autouse=True)
def library(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    library.disable_progress_bars()
    return library


def _save(path, columns):
    from datasets import Dataset

    Dataset.from_dict(columns).save_to_disk(str(path))
    return path


def _open(path, **keys):
    return opened(**{"source": "datasets", "path": path, **keys})


def _files(path):
    return SourceFiles(DataConfig(source="datasets", path=str(path)))


def _version(path):
    return _files(path).fingerprint.digest


def test_datasets_saved_ones_are_read_in_sorted_order_without_their_format(tmp_path, library):
    for name in "ba":
        _save(tmp_path / name, {"text": [name]})
    assert all_of(_open(f"{tmp_path / 'b'},{tmp_path / 'a'}")) == ["a", "b"]
    rows = library.Dataset.from_dict({"tokens": [[1, 2], [], [3]]}).with_format("numpy")
    rows.save_to_disk(str(tmp_path / "saved"))
    assert [ids.tolist() for ids in all_of(_open(tmp_path / "saved"))] == [[1, 2], [], [3]]


def test_datasets_files_of_every_kind_are_read(tmp_path, library):
    rows = library.Dataset.from_dict({"content": TEXTS})
    config = {"column": "content", "cache_dir": str(tmp_path / "cache")}
    for kind in ("jsonl", "json", "parquet", "csv"):
        file = tmp_path / f"a.{kind}"
        getattr(rows, f"to_{kind.removesuffix('l')}")(str(file))
        assert all_of(_open(file, **config)) == TEXTS
    assert list((tmp_path / "cache" / "datasets").iterdir())
    assert not (tmp_path / "hf").exists()


def test_datasets_configuration_and_split_of_a_repository_are_read(tmp_path, monkeypatch):
    files = ""
    for language in ("en", "de"):
        (tmp_path / "repo" / language).mkdir(parents=True)
        files += f"- config_name: {language}\n  data_files:\n"
        for split in ("train", "test"):
            file = f"{language}/{split}.jsonl"
            (tmp_path / "repo" / file).write_text(json.dumps({"text": f"{language} {split}"}))
            files += f"  - {{split: {split}, path: {file}}}\n"
    (tmp_path / "repo" / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert all_of(_open("hf:~/repo:en")) == ["en train"]
    name = f"hf:{tmp_path / 'repo'}"
    assert all_of(_open(f"{name}:de:test")) == ["de test"]
    assert len({_version(f"{name}:{x}") for x in ("en", "de", "en:test", "en")}) == 3
    with pytest.raises(ConfigError, match=r"data\.path: hf:.*repo cannot be read.*Config name"):
        _open(name)


def test_datasets_that_cannot_be_used_are_refused(tmp_path, library):
    rows = library.Dataset.from_dict({"text": ["a"]})
    library.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "all"))
    assert all_of(_open(tmp_path / "all" / "test")) == ["a"]
    _save(tmp_path / "a", {"body": ["a"], "id": [1]})
    (tmp_path / "mixed").mkdir()
    for name, content in {"a.jsonl": "no json\n", "b.parquet": "PAR1"}.items():
        (tmp_path / "mixed" / name).write_text(content)
    (tmp_path / "c.exe").write_text("x")
    damaged = _save(tmp_path / "damaged", {"text": TEXTS})
    (damaged / "state.json").write_text("{")
    assert _version(damaged)  # the error is left to who reads the rows
    for path, message in [
        (tmp_path / "a", 'has the columns body, id; it needs "text" or "tokens"'),
        (tmp_path / "all", r"is a data set of splits; give one, such as \S+all/train"),
        (damaged, r".*damaged cannot be read by datasets"),
        (tmp_path / "mixed" / "a.jsonl", r".*a\.jsonl cannot be read by datasets"),
        (tmp_path / "mixed", r"several kinds: json such as .*; give a glob for each"),
        (tmp_path / "c.exe", r"c\.exe is none of \*\.arrow"),
        (tmp_path / "none", "no file at .*none"),
    ]:
        with pytest.raises(ConfigError, match=rf"^data\.path: .*{message}"):
            _open(path)


def test_datasets_fingerprint_is_that_of_the_rows_wherever_they_lie(tmp_path):
    saved = _save(tmp_path / "a", {"text": TEXTS})
    before = _files(saved).fingerprint
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "_fingerprint": "another"}))
    (saved / "cache-1234.arrow").write_text("of map()")
    saved.rename(tmp_path / "b")
    assert _files(tmp_path / "b").change_since(before) is None
    other = _save(tmp_path / "c", {"text": TEXTS[::-1]})
    assert _files(other).change_since(before) is not None


OLD, NEW = "0" * 40, "1" * 40  # commits


@pytest.fixture
def hub(tmp_path, monkeypatch, library):
    """Return what sets the commit that the library loads, whatever it is asked for."""
    commit = ""

    def push(name):
        nonlocal commit
        commit = name

    def load_dataset(*_, **__):
        file = tmp_path / commit / "name-train.arrow"
        saved = _save(tmp_path / f"saved-{commit}", {"text": TEXTS})
        file.parent.mkdir(exist_ok=True)
        shutil.copy(saved / "data-00000-of-00001.arrow", file)
        return library.Dataset.from_file(str(file))

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    return push


def test_datasets_fingerprint_of_the_hub_names_commits(hub):
    hub(OLD)
    before = _files("hf:org/name:en").fingerprint
    assert _version(f"hf:org/name@{OLD}:en") == before.digest
    assert _version("hf:org/name:en:test") != before.digest
    one, both = _files("hf:org/b").fingerprint, _files("hf:org/b,hf:org/a")
    change = both.change_since(one)
    assert change is not None
    assert change[0] == CHANGED  # a is read first, so nothing was appended
    assert _files("hf:org/a,hf:org/b").change_since(both.fingerprint) is None
    hub(NEW)
    text = f"hf:org/name:en:train has commit {NEW} now; hf:org/name@{OLD}:en:train is that of then"
    assert _files("hf:org/name:en").change_since(before) == (CHANGED, text)


def test_datasets_of_another_commit_than_the_revision_names_are_refused(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", None)  # as without a network
    hub(NEW)
    assert all_of(_open(f"hf:org/name@{NEW}")) == TEXTS
    with pytest.raises(ConfigError, match=f"org/name@{OLD}: .* has commit {NEW}, not {OLD}; load"):
        _open(f"hf:org/name@{OLD}")
    with pytest.raises(ConfigError, match=f"name@v1: .* has commit {NEW}, not that of it"):
        _open("hf:org/name@v1")


TALK = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "漢"}]


def test_datasets_chat_reads_conversations_and_names_bad_rows(tmp_path):
    def opened(name, columns, column=""):
        path = _save(tmp_path / name, columns)
        return _open(path, source="datasets_chat", column=column, chat_template="chatml")

    tools = [[{"name": "f"}], None]
    for column in ("", "conversation"):
        columns = {column or "messages": [TALK, TALK[1:]], "tools": tools}
        documents = all_of(opened(f"saved-{column}", columns, column))
        assert [document.text for document in documents] == [
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n漢<|im_end|>\n",
            "<|im_start|>assistant\n漢<|im_end|>\n",
        ]
        assert all(document.spans for document in documents)
    for rows, index, message in [
        ([[{"role": "user", "content": b"a"}]], 0, "a: row 0: not a JSON object .*bytes"),
        ([TALK, []], 1, "a: row 1: not a JSON object with a list of"),
    ]:
        with pytest.raises(ConfigError, match=rf"^data\.path: \S*{message}"):
            opened("a", {"messages": rows})[index]
    with pytest.raises(ConfigError, match=r'has the columns messages; it needs "talks"'):
        opened("b", {"messages": [TALK]}, "talks")
