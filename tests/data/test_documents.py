"""Documents of files, the split into training and evaluation, and the framing of documents."""

import numpy as np
import pytest

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import EncodedDocuments, MarkedText, open_documents, split_documents
from maxpipe.data.tokenizers import load_tokenizer


def _documents(count):
    return [f"document {i}" for i in range(count)]


def test_split_documents_puts_each_in_exactly_one_split():
    for fraction in [0.001, 0.1, 0.5]:
        for count in [2, 3, 50, 4000]:
            documents = _documents(count)
            splits = [split_documents(documents, split, fraction) for split in ("train", "eval")]
            read = [[split[i] for i in range(len(split))] for split in splits]
            assert all(read)
            assert sorted(read[0] + read[1]) == sorted(documents)
    assert len(split_documents(_documents(10_000), "eval", 0.1)) == pytest.approx(1000, rel=0.1)
    before = split_documents(_documents(1000), "eval", 0.1)
    after = split_documents(_documents(1500), "eval", 0.1)
    assert [after[i] for i in range(len(before))] == [before[i] for i in range(len(before))]


def test_split_that_would_be_empty_is_refused(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n\n")
    with pytest.raises(ConfigError, match=r"data\.path: there is no document in .*blank\.jsonl"):
        open_documents(DataConfig(source="jsonl", path=str(tmp_path / "blank.jsonl")), "train")
    assert len(split_documents(_documents(5), "train", 0.0)) == 5
    with pytest.raises(ConfigError, match=r"data\.eval_fraction: 0 .* eval\.every=0"):
        split_documents(_documents(5), "eval", 0.0)
    for split in ["train", "eval"]:
        with pytest.raises(ConfigError, match=r"data\.path: 1 document .*data\.eval_fraction=0"):
            split_documents(_documents(1), split, 0.1)


def test_open_documents_sources_without_path_open():
    for source in SOURCES:
        template = "chatml" if SOURCES[source].is_chat else ""
        config = DataConfig(source=source, chat_template=template)
        if not SOURCES[source].needs_path:
            assert len(open_documents(config, "train"))
        else:
            with pytest.raises(ConfigError, match=r"^data\.path: this data\.source needs a file"):
                open_documents(config, "train")


BOS, EOS = 256, 257


def _encode(document, vocab_size=259):
    return EncodedDocuments([document], load_tokenizer("byte"), vocab_size)[0].ids


def test_encoded_documents_are_framed():
    cases = [
        ("hé", [BOS, ord("h"), 0xC3, 0xA9, EOS]),
        *((np.array([5, 6], dtype), [BOS, 5, 6, EOS]) for dtype in ("u2", "u4", "u8", "i8")),
        (np.array([BOS, 5, EOS]), [BOS, 5, EOS]),  # framed already
        ("", []),
    ]
    for document, expected in cases:
        ids = _encode(document)
        assert (ids.tolist(), ids.dtype) == (expected, np.int32)


def test_encoded_documents_marked_text_is_not_framed_and_has_targets_in_its_spans():
    document = MarkedText("aébc", ((1, 2), (3, 4)))
    ids, weights = EncodedDocuments([document], load_tokenizer("byte"), vocab_size=259)[0]
    assert ids.tolist() == [ord("a"), 0xC3, 0xA9, ord("b"), ord("c")]
    assert weights.tolist() == [0, 1, 1, 0, 1]


def test_encoded_documents_that_do_not_fit_the_tokenizer_raise():
    other = r"data\.tokenizer: has 259 ids, but .* 5 to 300: name the .* data\.tokenizer=hf:"
    for vocab_size in (259, 1000):
        with pytest.raises(ConfigError, match=other):
            _encode(np.array([5, 300]), vocab_size)
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 200 is too small .* 5 to 250"):
        _encode(np.array([5, 250]), 200)
