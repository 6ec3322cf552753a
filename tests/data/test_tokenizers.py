"""Bytes as tokens, and Hugging Face tokenizer.json files made here."""

import errno
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from helpers.hf_folder import write_byte_pairs
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import ModelConfig
from maxpipe.data.documents import EncodedDocuments
from maxpipe.data.tokenizer_json import HuggingFaceTokenizer
from maxpipe.data.tokenizers import (
    encode_prompt,
    load_tokenizer,
    needed_ids,
    tokenizer_files,
    unknown_tokens,
)

TEXT = "the quick brown fox jumps over the lazy dog, é 漢字"


def _make(directory: Path, specials: list[str]) -> Path:
    return write_byte_pairs(directory, TEXT, specials, size=300)


def test_hugging_face_pickled_tokenizer_round_trips(tmp_path: Path) -> None:
    path = _make(tmp_path, ["<s>", "</s>"])
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(str(path))))
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32
    assert len(ids) < len(TEXT.encode())
    assert not {tokenizer.bos_id, tokenizer.eos_id} & {*ids.tolist()}
    assert tokenizer.decode(np.array([tokenizer.bos_id, *ids, tokenizer.eos_id])) == TEXT
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 1)
    assert tokenizer.vocab_size == Tokenizer.from_file(str(path)).get_vocab_size()


def test_tokenizer_of_a_folder_is_that_of_its_file(tmp_path: Path) -> None:
    path = _make(tmp_path, ["<s>", "</s>"])
    assert tokenizer_files(f"hf:{tmp_path}") == [path]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert tokenizer_files(f"hf:{tmp_path}") == [path, tmp_path / "tokenizer_config.json"]
    assert load_tokenizer(f"hf:{tmp_path}").eos_id == 0


def test_documents_and_prompts_begin_as_the_post_processor_says(tmp_path: Path) -> None:
    for single, begin in [("", []), ("<s> $A", [0]), ("<s> $A </s>", [0])]:
        (folder := tmp_path / f"of {single}".replace("/", "")).mkdir()
        path = _make(folder, ["<s>", "</s>"])
        stored = Tokenizer.from_file(str(path))
        stored.post_processor = processors.TemplateProcessing(
            single=single or "$A", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        stored.save(str(path))
        tokenizer = load_tokenizer(f"hf:{folder}")
        ids = tokenizer.encode("fox").tolist()
        assert tokenizer.bos_id == 0
        assert encode_prompt(tokenizer, "fox") == begin + ids
        assert encode_prompt(tokenizer, "<s>fox") == [0, *ids]
        documents = EncodedDocuments(["fox"], tokenizer, tokenizer.vocab_size)
        assert documents[0].ids.tolist() == [*begin, *ids, 1]


def test_special_tokens_map_names_tokens_where_the_config_has_no_added_tokens(
    tmp_path: Path,
) -> None:
    names = {"bos_token": {"content": "<a>"}, "eos_token": "<b>", "pad_token": "<c>"}
    path = _make(tmp_path, ["<a>", "<b>", "<c>", "</s>"])
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    assert path.with_name("special_tokens_map.json") in tokenizer_files(str(path))
    tokenizer = HuggingFaceTokenizer(str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "</s>"}')
    assert HuggingFaceTokenizer(str(path)).eos_id == 1
    config.write_text('{"eos_token": "</s>", "added_tokens_decoder": {}}')
    assert HuggingFaceTokenizer(str(path)).eos_id == 3


def test_file_of_another_library_says_what_to_do(tmp_path: Path) -> None:
    tiktoken = "IQ== 0\nIg== 1\n"
    cases = [
        ("a.tiktoken", tiktoken, "tiktoken, .*save_pretrained"),
        ("tiktoken.model", tiktoken, "tiktoken, .*save_pretrained"),
        ("tekken.json", '{"vocab": [{"token_bytes": "AA=="}]}', "tekken, .*save_pretrained"),
        ("vocab.json", '{"a": 0}', "an older tokenizer, .*save_pretrained"),
        ("tokenizer.model.v3", "\n\x0e\n\x05<unk>\x15", "a SentencePiece model: .* ends in .model"),
    ]
    for name, content, words in cases:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(content)
        for path in [folder / name, folder][: 1 + (name != "a.tiktoken")]:
            with pytest.raises(ConfigError, match=rf"^data\.tokenizer: .* is (a file of )?{words}"):
                load_tokenizer(str(path))
        _make(folder, ["<s>", "</s>"])
        assert load_tokenizer(f"hf:{folder}").eos_id == 1


def test_hugging_face_tokenizer_config_names_special_tokens(tmp_path: Path) -> None:
    path = _make(tmp_path, ["<a>", "<b>", "<c>", "</s>", "<s>"])
    for config, expected in [
        ({"bos_token": "<a>", "eos_token": {"content": "<b>"}, "pad_token": "<c>"}, (0, 1, 2)),
        ({"bos_token": "<a>", "add_bos_token": False, "eos_token": "<c>"}, (None, 2, 2)),
        ({"bos_token": None, "eos_token": "<b>", "pad_token": None}, (None, 1, 1)),
        ({"model_max_length": 1024}, (None, 3, 3)),  # the end has a common name
    ]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = HuggingFaceTokenizer(str(path))
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == expected


def test_tokenizer_config_that_is_damaged_is_refused(tmp_path: Path) -> None:
    for content, message in [
        ("{", "tokenizer_config.json is not JSON"),
        ("[" * 100_000, "tokenizer_config.json is not JSON"),
        ('["</s>"]', "tokenizer_config.json is not a JSON object"),
        ("null", "tokenizer_config.json is not a JSON object"),
        ('{"eos_token": ["</s>"]}', "tokenizer.json has no end-of-document token"),
        ('{"eos_token": {"id": 1}}', "tokenizer.json has no end-of-document token"),
        ('{"eos_token": null}', "tokenizer.json has no end-of-document token"),
    ]:
        path = _make(tmp_path, ["<s>", "</s>"])
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"^data\.tokenizer: \S*{message}"):
            load_tokenizer(str(path))


def test_config_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = _make(tmp_path, ["<s>", "</s>"])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read: Permission"):
        load_tokenizer(str(path))


def test_stored_cutting_and_padding_are_not_obeyed(tmp_path: Path) -> None:
    for is_cut in [True, False]:
        path = _make(tmp_path, ["<s>", "</s>"])
        ids = load_tokenizer(str(path)).encode(TEXT).tolist()
        stored = Tokenizer.from_file(str(path))
        if is_cut:
            stored.enable_truncation(3)
        else:
            stored.enable_padding(length=len(ids) + 9)
        saved = tmp_path / "saved.json"
        stored.save(str(saved))
        assert Tokenizer.from_file(str(saved)).encode(TEXT, add_special_tokens=False).ids != ids
        tokenizer = HuggingFaceTokenizer(str(saved))
        assert tokenizer.encode(TEXT).tolist() == ids
        assert tokenizer.encode_with_offsets(TEXT)[0].tolist() == ids
        assert encode_prompt(tokenizer, TEXT) == [tokenizer.bos_id, *ids]


def test_unknown_tokens_are_added_ones_above_the_model(tmp_path: Path) -> None:
    path = _make(tmp_path, ["<s>", "</s>"])
    stored = Tokenizer.from_file(str(path))
    num_own = stored.get_vocab_size()
    stored.add_special_tokens(["<image>", "<audio>"])
    stored.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == num_own + 2

    def model(num_ids: int, from_hf: str = "org/name") -> ModelConfig:
        return ModelConfig(vocab_size=num_ids, from_hf=from_hf)

    assert unknown_tokens(tokenizer, model(num_own + 2)) == []
    assert unknown_tokens(tokenizer, model(num_own + 1)) == ["<audio>"]
    assert unknown_tokens(tokenizer, model(num_own)) == ["<image>", "<audio>"]
    assert needed_ids(tokenizer, model(num_own)) == num_own
    assert needed_ids(tokenizer, model(num_own, from_hf="")) == num_own + 2
    assert needed_ids(load_tokenizer("byte"), model(258)) == 259


def test_hugging_face_without_end_of_document_raises(tmp_path: Path) -> None:
    path = _make(tmp_path, [])
    empty = tmp_path / "empty.json"
    Tokenizer(models.BPE()).save(str(empty))
    for file in (path, empty):
        with pytest.raises(ConfigError, match=r"data\.tokenizer: .* has no end-of-document token"):
            load_tokenizer(str(file))


def test_load_tokenizer_missing_file_raises(tmp_path: Path) -> None:
    for name in ["none", f"{'n' * 300}/none"]:
        with pytest.raises(
            ConfigError,
            match=r"data\.tokenizer: '.*/none' is neither 'byte' nor .* SentencePiece \.model",
        ):
            load_tokenizer(str(tmp_path / name))


def test_hugging_face_other_json_raises(tmp_path: Path) -> None:
    for content in ["", "{}", "no json"]:
        path = tmp_path / "tokenizer.json"
        path.write_text(content)
        with pytest.raises(
            ConfigError, match=r"data\.tokenizer: \S* is not a Hugging Face tokenizer\.json"
        ):
            load_tokenizer(str(path))


@given(st.text())
def test_byte_tokenizer_any_text_round_trips(text: str) -> None:
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == [*text.encode()]
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text


class TestTokenBytes:
    def bpe(self, tmp_path, **options):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            special_tokens=["</s>"],
            vocab_size=300,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(["the quick für 🙂 fox"] * 4, trainer)
        tokenizer.add_tokens(["jümps"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(str(tmp_path / "tokenizer.json"))

    def test_bytes_of_a_byte_level_text_add_up_exactly(self, tmp_path):
        tokenizer = self.bpe(tmp_path, add_prefix_space=False)
        text = "the quick für 🙂 fox\n\n  jümps over"
        ids = tokenizer.encode(text)
        assert len(ids) < len(text.encode())
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.token_bytes[tokenizer.eos_id] == 0
        assert len(tokenizer.token_bytes) == tokenizer.vocab_size

    def test_bytes_of_the_byte_tokenizer_are_one_each(self):
        tokenizer = load_tokenizer("byte")
        assert tokenizer.token_bytes[tokenizer.encode("für")].sum() == 4
        assert tokenizer.token_bytes[256:].tolist() == [0, 0, 0]

    def test_bytes_that_cannot_be_told_exactly_are_none(self, tmp_path):
        assert self.bpe(tmp_path, add_prefix_space=True).token_bytes is None
        plain = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}, "a"))
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        plain.save(str(tmp_path / "plain.json"))
        assert load_tokenizer(str(tmp_path / "plain.json")).token_bytes is None


def test_plain_ids_are_written_as_numbers() -> None:
    tokenizer = load_tokenizer("ids:32")
    ids = tokenizer.encode("3 1\n30")
    assert (ids.dtype, ids.tolist()) == (np.int32, [3, 1, 30])
    assert tokenizer.decode([3, 1, 30, tokenizer.eos_id]) == "3 1 30"
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32, None, 31)
    assert tokenizer_files("ids:32") == []


def test_plain_ids_other_text_is_refused() -> None:
    for text in ["def", "3 32", "-1", "1.5"]:
        with pytest.raises(ConfigError, match="is not one of 32 ids, which stand for no text"):
            load_tokenizer("ids:32").encode(text)
