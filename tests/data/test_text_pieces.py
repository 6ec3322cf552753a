"""A single text file trains, with a held-out share or with a validation set of its own."""

import pytest

from maxpipe.config import Config, ConfigError, load, replace
from maxpipe.data.documents import notes_of, open_documents
from maxpipe.data.loader import make_loader
from maxpipe.data.sources.text import LEAST_PIECES


def config_of(file, **values):
    return replace(
        Config(),
        **{"data.source": "text", "data.path": str(file), "data.sequence_length": 32},
        **values,
    )


def texts(config, split):
    documents = open_documents(config.data, split)
    return [documents[i] for i in range(len(documents))]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("".join(f"line {i}: für immer\n" for i in range(5000)), encoding="utf-8")
    return path


def test_one_text_file_is_split_into_training_and_evaluation(file):
    config = config_of(file)
    train, held_out = texts(config, "train"), texts(config, "eval")
    assert len(train) > 10 * len(held_out) > 0
    pieces = train + held_out
    assert max(len(piece.encode()) for piece in pieces) <= 4096
    assert all(piece.endswith("\n") for piece in pieces)
    lines = sorted(line for piece in pieces for line in piece.splitlines())
    assert lines == sorted(file.read_text(encoding="utf-8").splitlines())
    (note,) = notes_of(open_documents(config.data, "train"))
    assert note == (
        f"{file} is one text file: read as {len(pieces)} documents of up to 4,096 bytes"
    )


def test_one_text_file_without_lines_is_cut_between_characters(tmp_path):
    large = ("€" * 5000, "a" * 3 + "🙂" * 3000, "x" * 9)
    for text in (*large, "héllo", "你好 world", "🙂 hello", "a🙂"):
        file = tmp_path / "input.txt"
        file.write_text(text, encoding="utf-8")
        config = config_of(file)
        pieces = texts(config, "train") + texts(config, "eval")
        assert sorted("".join(pieces)) == sorted(text)
        assert text not in large or len(pieces) >= LEAST_PIECES - 1


def test_one_text_file_has_newlines_only_and_no_mark_of_byte_order(tmp_path):
    file = tmp_path / "input.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"one\r\ntwo\rthree\n" * 500)
    config = config_of(file)
    pieces = "".join(texts(config, "train") + texts(config, "eval"))
    assert not {"\r", "\ufeff"} & {*pieces}
    assert pieces.splitlines().count("three") == 500
    (whole,) = texts(config_of(file, **{"data.eval_fraction": 0.0}), "train")
    assert whole == "one\ntwo\nthree\n" * 500


def test_piece_that_is_not_utf8_is_named_with_its_byte(file):
    content = bytearray(file.read_bytes())
    content[70_000] = 0xFF
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"input\.txt is not UTF-8 text: byte 70000"):
        texts(config_of(file), "train") + texts(config_of(file), "eval")


def test_eval_path_is_all_of_evaluation_and_nothing_is_held_out(file, tmp_path):
    for name in ("v0", "v1"):
        (tmp_path / f"{name}.val").write_text(f"validation {name}")
    config = config_of(file, **{"data.eval_path": str(tmp_path / "*.val")})
    assert texts(config, "eval") == ["validation v0", "validation v1"]
    assert sorted("".join(texts(config, "train"))) == sorted(file.read_text(encoding="utf-8"))
    mixture = [{"source": "text", "path": str(file), "weight": 1.0}] * 2
    config = replace(config, **{"data.path": "", "data.mixture": mixture})
    loader = make_loader(config, "eval", range(2))
    assert loader.num_documents == 2
    assert bytes(next(loader)["tokens"][0, 1:3].tolist()) == b"va"
    loader.close()


def test_eval_path_that_matches_nothing_or_has_no_reader_is_an_error(file):
    with pytest.raises(ConfigError, match=r"data\.eval_path: no file at '/nowhere'"):
        open_documents(config_of(file, **{"data.eval_path": "/nowhere"}).data, "eval")
    with pytest.raises(ConfigError, match=r"data\.eval_path .*no effect with data\.source=synth"):
        load("configs/base.yml", ["data.source=synthetic", "data.eval_path=x.txt"])
