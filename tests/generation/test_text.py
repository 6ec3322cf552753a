"""`TextStream` returns complete characters and loses none."""

import pytest
import tokenizers

from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.generation.text import TextStream

BYTE = load_tokenizer("byte")


def pieces(ids, prompt="x"):
    stream = TextStream(BYTE, BYTE.encode(prompt).tolist())
    return [*(stream.add(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", ["abc", "für 5 €", "\U0001f642!", "a\n\n b"])
def test_text_stream_returns_characters_when_complete(text):
    found = pieces(BYTE.encode(text).tolist())
    assert [piece for piece in found if piece] == list(text)


def test_text_stream_finish_returns_incomplete_character():
    assert pieces([ord("a"), 0xC3]) == ["a", "", "\ufffd"]


def test_text_stream_invalid_bytes_come_with_next_text():
    assert "".join(pieces([0x80, ord("a"), 0xC3, ord("b")])) == "\ufffda\ufffdb"


def test_text_stream_prompt_ending_in_character_is_not_repeated():
    stream = TextStream(BYTE, [0xC3])
    assert stream.add(0xA4) == ""
    assert stream.add(ord("b")) == "b"


def test_text_stream_keeps_spaces_before_words(tmp_path):
    """A token that begins a word loses its space if it is decoded alone."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        tokenizers.pre_tokenizers.Metaspace(),
        tokenizers.decoders.Metaspace(),
    )
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["</s>"], vocab_size=40, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = loaded.encode("the lazy fox jumps over the dog").tolist()
    stream = TextStream(loaded, ids[:3])
    text = loaded.decode(ids[:3]) + "".join(map(stream.add, ids[3:])) + stream.finish()
    assert text == "the lazy fox jumps over the dog"
