"""Bytes as tokens, tokenizer.json files and SentencePiece models made here."""

import json
import pickle

import numpy as np
import pytest
from helpers.hf_folder import write_byte_pairs
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from maxpipe.config.errors import ConfigError
from maxpipe.data.documents import EncodedDocuments
from maxpipe.data.tokenizers import (
    HuggingFaceTokenizer,
    encode_prompt,
    load_tokenizer,
    tokenizer_files,
)

TEXT = "the quick brown fox jumps over the lazy dog, é 漢字"


def _make(directory, specials):
    return write_byte_pairs(directory, TEXT, specials, size=300)


def test_documents_and_prompts_begin_as_the_post_processor_says(tmp_path):
    for single, begin in [("", []), ("<s> $A", [0]), ("<s> $A </s>", [0])]:
        (folder := tmp_path / f"of {single}".replace("/", "")).mkdir()
        path = _make(folder, ["<s>", "</s>"])
        stored = Tokenizer.from_file(str(path))
        stored.post_processor = processors.TemplateProcessing(
            single=single or "$A", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        stored.save(str(path))
        tokenizer = pickle.loads(pickle.dumps(load_tokenizer(f"hf:{folder}")))
        ids = tokenizer.encode("fox").tolist()
        assert tokenizer.decode([0, *ids, 1]) == "fox"
        assert tokenizer.bos_id == 0
        assert encode_prompt(tokenizer, "fox") == begin + ids
        assert encode_prompt(tokenizer, "<s>fox") == [0, *ids]
        documents = EncodedDocuments(["fox"], tokenizer, tokenizer.vocab_size)
        assert documents[0].ids.tolist() == [*begin, *ids, 1]


def test_files_next_to_a_tokenizer_name_its_special_tokens(tmp_path):
    path = _make(tmp_path, ["<a>", "<b>", "<c>", "</s>", "<s>"])
    mapped = {"bos_token": {"content": "<a>"}, "eos_token": "<b>", "pad_token": "<c>"}
    added = {"added_tokens_decoder": {}}
    listed = {"bos_token": "<a>", "eos_token": {"content": "<b>"}, "pad_token": "<c>"}
    names = [
        (None, None, (4, 3, 3)),  # all have common names
        (listed, None, (0, 1, 2)),
        ({"bos_token": "<a>", "add_bos_token": False, "eos_token": "<c>"}, None, (None, 2, 2)),
        ({"bos_token": None, "eos_token": "<b>", "pad_token": None}, None, (None, 1, 1)),
        ({"model_max_length": 1024}, None, (None, 3, 3)),  # the end has a common name
        (None, mapped, (0, 1, 2)),
        ({"eos_token": "</s>"}, mapped, (0, 1, 2)),
        ({"eos_token": "</s>", **added}, mapped, (None, 3, 3)),
    ]
    for config, special_tokens_map, expected in names:
        files = {"tokenizer_config.json": config, "special_tokens_map.json": special_tokens_map}
        for name, content in files.items():
            (tmp_path / name).unlink(missing_ok=True)
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        there = [tmp_path / name for name, content in files.items() if content is not None]
        assert tokenizer_files(f"hf:{tmp_path}") == [path, *there]
        tokenizer = HuggingFaceTokenizer(str(path))
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == expected


def test_unusable_tokenizer_is_refused(tmp_path):
    path = _make(tmp_path, ["<s>", "</s>"])
    config = tmp_path / "tokenizer_config.json"
    for content, message in [
        ("{", r"tokenizer_config\.json cannot be read as JSON"),
        ('{"eos_token": null}', r"tokenizer\.json has no end-of-document token"),
    ]:
        config.write_text(content)
        with pytest.raises(ConfigError, match=rf"^data\.tokenizer: \S*{message}"):
            load_tokenizer(str(path))
    config.unlink()
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    (tmp_path / "other.json").write_text("{}")
    for name, message in [
        ("empty.json", "has no end-of-document token"),
        ("none", "is neither 'byte' nor .* convert other formats"),
        ("other.json", r"is not a Hugging Face tokenizer\.json: .*; convert other"),
    ]:
        with pytest.raises(ConfigError, match=rf"^data\.tokenizer: '?\S*{name}'? {message}"):
            load_tokenizer(str(tmp_path / name))


def test_stored_cutting_and_padding_are_not_obeyed(tmp_path):
    path = _make(tmp_path, ["<s>", "</s>"])
    ids = load_tokenizer(str(path)).encode(TEXT).tolist()
    for is_cut in [True, False]:
        stored = Tokenizer.from_file(str(path))
        if is_cut:
            stored.enable_truncation(3)
        else:
            stored.enable_padding(length=len(ids) + 9)
        saved = tmp_path / "saved.json"
        stored.save(str(saved))
        tokenizer = HuggingFaceTokenizer(str(saved))
        assert tokenizer.encode(TEXT).tolist() == ids
        assert tokenizer.encode_with_offsets(TEXT)[0].tolist() == ids
        assert encode_prompt(tokenizer, TEXT) == [tokenizer.bos_id, *ids]


@given(st.text())
def test_byte_tokenizer_any_text_round_trips(text):
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == [*text.encode()]
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text


def _byte_level(path, **options):
    plain = write_byte_pairs(path.parent, "the quick für 🙂 fox", ["</s>"], size=300)
    tokenizer = Tokenizer.from_file(str(plain))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    tokenizer.add_tokens(["jümps"])
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


def test_bytes_of_a_text_add_up_exactly_or_are_not_told(tmp_path):
    text = "the quick für 🙂 fox\n\n  jümps over"
    own = _byte_level(tmp_path / "own.json", add_prefix_space=False)
    for tokenizer in (own, load_tokenizer("byte")):
        counts = tokenizer.token_bytes
        assert counts[tokenizer.encode(text)].sum() == len(text.encode())
        assert counts[tokenizer.eos_id] == 0
        assert len(counts) == tokenizer.vocab_size
    assert _byte_level(tmp_path / "spaced.json", add_prefix_space=True).token_bytes is None
    plain = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, "a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "plain.json"))
    assert load_tokenizer(str(tmp_path / "plain.json")).token_bytes is None


def test_plain_ids_are_written_as_numbers():
    tokenizer = load_tokenizer("ids:32")
    ids = tokenizer.encode("3 1\n30")
    assert (ids.dtype, ids.tolist()) == (np.int32, [3, 1, 30])
    assert tokenizer.decode([3, 1, 30, tokenizer.eos_id]) == "3 1 30"
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32, None, 31)
    assert tokenizer_files("ids:32") == []
    for text in ["def", "3 32", "-1", "1.5"]:
        with pytest.raises(ConfigError, match="is not one of 32 ids, which stand for no text"):
            tokenizer.encode(text)


LINES = [f"the quick brown fox number {i} jumps over the lazy dog" for i in range(50)]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `data`")

    def _train(**options):
        prefix = tmp_path_factory.mktemp("model") / "tokenizer"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_prefix=str(prefix),
            vocab_size=44,
            minloglevel=2,
            **options,
        )
        return f"{prefix}.model"

    return _train


def test_sentencepiece_round_trips_and_has_special_tokens(train):
    path = train(pad_id=3)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(LINES[0])
    assert ids.dtype == np.int32
    assert 0 < len(ids) < len(LINES[0])
    assert tokenizer.decode(ids) == LINES[0]
    special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert (tokenizer.vocab_size, special) == (44, (1, 2, 3))
    assert tokenizer.decode([1, *ids, 2, 50]) == LINES[0]
    again = pickle.loads(pickle.dumps(tokenizer))
    np.testing.assert_array_equal(again.encode(LINES[1]), tokenizer.encode(LINES[1]))


def test_sentencepiece_without_special_tokens_or_model_raises(train, tmp_path):
    tokenizer = load_tokenizer(train(bos_id=-1))
    assert tokenizer.bos_id is None
    assert tokenizer.pad_id == tokenizer.eos_id
    (tmp_path / "a.model").write_text("no model")
    for path, message in [
        (train(eos_id=-1), r".* has no end-of-document token"),
        (str(tmp_path / "a.model"), ".* is no SentencePiece model: .*; convert other formats"),
    ]:
        with pytest.raises(ConfigError, match=rf"^data\.tokenizer: {message}"):
            load_tokenizer(path)
