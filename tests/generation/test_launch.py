"""Text comes out whole characters at a time, and nothing is lost."""

import pytest
import tokenizers

from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.generation.launch import TextStream

BYTE = load_tokenizer("byte")


def pieces(ids, prompt="x"):
    stream = TextStream(BYTE, BYTE.encode(prompt).tolist())
    return [*(stream.add(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("text", ["abc", "für 5 €", "\U0001f642!", "a\n\n b"])
def test_characters_come_when_they_are_complete(text):
    found = pieces(BYTE.encode(text).tolist())
    assert [piece for piece in found if piece] == list(text)


def test_a_character_that_is_never_completed_comes_at_the_end():
    assert pieces([ord("a"), 0xC3]) == ["a", "", "\ufffd"]


def test_bytes_that_are_no_text_come_with_what_follows():
    assert "".join(pieces([0x80, ord("a"), 0xC3, ord("b")])) == "\ufffda\ufffdb"


def test_nothing_of_the_prompt_is_repeated_even_if_it_ends_inside_a_character():
    stream = TextStream(BYTE, [0xC3])
    assert stream.add(0xA4) == ""
    assert stream.add(ord("b")) == "b"


def test_spaces_before_words_stay(tmp_path):
    """Decoded by itself, a token that begins a word has lost its space."""
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
