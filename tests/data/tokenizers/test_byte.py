"""Bytes as tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.data.tokenizers import load_tokenizer


@given(st.text())
def test_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == [*text.encode()]
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id, tokenizer.pad_id]) == text


def test_vocabulary() -> None:
    tokenizer = load_tokenizer("byte")
    specials = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    assert specials == {256, 257, 258}
    assert tokenizer.vocab_size == 259


def test_bytes_that_are_no_text() -> None:
    assert load_tokenizer("byte").decode([0x61, 0xFF]) == "a\N{REPLACEMENT CHARACTER}"
