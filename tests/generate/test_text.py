"""`TextStream` returns complete characters and loses none."""

import pytest
import tokenizers
from tokenizers import decoders

from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.generate.text import TextStream

BYTE = load_tokenizer("byte")
SMILE = "\U0001f642"


def pieces(ids, prompt="x"):
    stream = TextStream(BYTE, BYTE.encode(prompt).tolist())
    return [*(stream.add(i) for i in ids), stream.finish()]


def test_text_stream_returns_characters_when_complete():
    for text in ["abc", "für 5 €", "\U0001f642!", "a\n\n b"]:
        found = pieces(BYTE.encode(text).tolist())
        assert [piece for piece in found if piece] == list(text)
    # Bytes that are no character come with the next text, or at the end.
    assert pieces([ord("a"), 0xC3]) == ["a", "", "\ufffd"]
    assert "".join(pieces([0x80, ord("a"), 0xC3, ord("b")])) == "\ufffda\ufffdb"


def test_text_stream_keeps_spaces_before_words(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    options = {"special_tokens": ["</s>"], "vocab_size": 40, "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(**options)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    ids = loaded.encode("the lazy fox jumps over the dog").tolist()
    stream = TextStream(loaded, ids[:3])
    text = loaded.decode(ids[:3]) + "".join(map(stream.add, ids[3:])) + stream.finish()
    assert text == "the lazy fox jumps over the dog"


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """A tokenizer as Llama 2's: it decodes a run of byte tokens as a whole, or none of it."""
    names = ["</s>", "\u2581", *"ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="</s>")
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["</s>"])
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return load_tokenizer(str(file))


def test_text_stream_runs_of_bytes_come_character_by_character(byte_fallback):
    for text in [f"a{SMILE}{SMILE}b", f"a{SMILE}\nb", f"a\n{SMILE} b", "a\n\n  b"]:
        ids = byte_fallback.encode(text).tolist()
        stream = TextStream(byte_fallback, ids[:1])
        assert [piece for piece in map(stream.add, ids[1:]) if piece] == list(text[1:])
        assert stream.finish() == ""
    # A special token does not take the next space.
    a, space, b = byte_fallback.encode("a b").tolist()
    stream = TextStream(byte_fallback, [a])
    added = [stream.add(token) for token in (byte_fallback.eos_id, space, b)]
    assert added == ["", " ", "b"]
