"""Text: a document per file, piece of a file, line of JSON, or module of Python's library."""

import gzip
import json
import os

import pytest
from helpers.documents import all_of, opened

from maxpipe.config import ConfigError, load
from maxpipe.config.sections import DataConfig
from maxpipe.data.sources.text import LEAST_PIECES


def _texts(path, split="train", source="text", **keys):
    keys = {"eval_fraction": DataConfig.eval_fraction, "sequence_length": 32, **keys}
    return all_of(opened(source, path, split, **keys))


def _both(path):
    return _texts(path) + _texts(path, "eval")


def _whole(path, source="text", **keys):
    return _texts(path, source=source, eval_fraction=0.0, **keys)


def test_text_files_are_read_in_sorted_order_without_empty_ones(tmp_path):
    contents = {
        "c.txt": b"",
        "b.txt.gz": gzip.compress(b"\xef\xbb\xbftwo\r\nor\rthree"),
        "a.txt": b"\xef\xbb\xbfone \xc3\xa9 \xef\xbb\xbf",  # with a mark of byte order
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    cache = {"cache_dir": str(tmp_path / ".cache")}
    assert _whole(tmp_path, **cache) == ["one é \ufeff", "two\nor\nthree"]
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"\xff"))
    with pytest.raises(ConfigError, match=r"/d\.txt\.gz is not UTF-8 text: byte 0"):
        _whole(tmp_path, **cache)
    with pytest.raises(ConfigError, match=r"data\.path: every file at .* is empty"):
        _whole(tmp_path / "c.txt")


def test_python_stdlib_has_every_module_once():
    texts = _whole("", "python_stdlib")
    assert len(texts) > 300
    assert all(texts)
    whole = "".join(texts)
    assert len(whole) > 4_000_000
    assert "import pytest" not in whole  # no tests, no packages
    with open(os.__file__, encoding="utf-8") as stream:
        assert texts.count(stream.read()) == 1


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("".join(f"line {i}: für immer\n" for i in range(5000)), encoding="utf-8")
    return path


def test_one_text_file_is_cut_at_ends_of_lines_into_both_splits(file):
    train, held_out = _texts(file), _texts(file, "eval")
    assert len(train) > 10 * len(held_out) > 0
    pieces = train + held_out
    assert max(len(piece.encode()) for piece in pieces) <= 4096
    assert all(piece.endswith("\n") for piece in pieces)
    lines = sorted(line for piece in pieces for line in piece.splitlines())
    assert lines == sorted(file.read_text(encoding="utf-8").splitlines())
    content = bytearray(file.read_bytes())
    content[70_000] = 0xFF
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"input\.txt is not UTF-8 text: byte 70000"):
        _both(file)


def test_one_text_file_without_lines_is_cut_between_characters(file):
    large = ("€" * 5000, "a" * 3 + "🙂" * 3000, "x" * 9)
    for text in (*large, "héllo", "你好 world", "🙂 hello", "a🙂"):
        file.write_text(text, encoding="utf-8")
        pieces = _both(file)
        assert sorted("".join(pieces)) == sorted(text)
        assert text not in large or len(pieces) >= LEAST_PIECES - 1


def test_eval_path_is_all_of_evaluation_and_nothing_is_held_out(file, tmp_path):
    for name in ("v0", "v1"):
        (tmp_path / f"{name}.val").write_text(f"validation {name}")
    values = {"eval_path": str(tmp_path / "*.val")}
    assert _texts(file, "eval", **values) == ["validation v0", "validation v1"]
    assert sorted("".join(_texts(file, **values))) == sorted(file.read_text(encoding="utf-8"))
    mixture = [{"source": "text", "path": str(file), "weight": 1.0}] * 2
    assert _texts("", "eval", mixture=mixture, **values) == ["validation v0", "validation v1"]
    with pytest.raises(ConfigError, match=r"data\.eval_path: no file at '/nowhere'"):
        _texts(file, "eval", eval_path="/nowhere")
    with pytest.raises(ConfigError, match=r"data\.eval_path .*no effect with data\.source=synth"):
        load("configs/base.yml", ["data.source=synthetic", "data.eval_path=x.txt"])


TEXTS = ["plain", "two\nlines", "é 漢字", "", "x" * 100]


def test_jsonl_files_have_a_document_in_each_line_that_is_not_blank(tmp_path):
    for last in [True, False]:
        for end in ["\n", "\r\n", "\n\n", "\r\n\r\n", "\n \t\n"]:
            for name, texts in (("a.jsonl", TEXTS), ("b.jsonl", TEXTS[::-1])):
                lines = [json.dumps({"id": 1, "text": line}, ensure_ascii=False) for line in texts]
                (tmp_path / name).write_bytes((end.join(lines) + (end if last else "")).encode())
            assert _whole(tmp_path, "jsonl") == TEXTS + TEXTS[::-1]


def test_jsonl_corrupt_line_is_named_by_its_number_among_blank_ones(tmp_path):
    path = tmp_path / "b.jsonl"
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    others = [b"{", b"[1]", b'{"a": 1}', b'{"text": 3}', b'"text"']
    for line in [*others, b'{"text": "\\ud800"}', b'{"text": "\xff"}']:
        path.write_bytes(b'\n{"text": "fine"}\n\r\n' + line + b'\n{"text": "also fine"}')
        documents = opened("jsonl", tmp_path)
        assert (documents[0], documents[2]) == ("fine", "also fine")
        with pytest.raises(
            ConfigError, match=rf"^data\.path: {path}:4: not a JSON object with a string under"
        ):
            documents[1]
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert _whole(path, "jsonl") == ["a", "b"]  # it is indexed again
