"""SentencePiece models, trained by the test."""

import pickle

import numpy as np
import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.data.tokenizers import load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra `data`")

TEXTS = [f"the quick brown fox number {i} jumps over the lazy dog" for i in range(50)]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    def _train(**options):
        prefix = tmp_path_factory.mktemp("model") / "tokenizer"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
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
    ids = tokenizer.encode(TEXTS[0])
    assert ids.dtype == np.int32
    assert 0 < len(ids) < len(TEXTS[0])
    assert tokenizer.decode(ids) == TEXTS[0]
    special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert (tokenizer.vocab_size, special) == (44, (1, 2, 3))
    assert tokenizer.decode([1, *ids, 2, 50]) == TEXTS[0]
    again = pickle.loads(pickle.dumps(tokenizer))
    np.testing.assert_array_equal(again.encode(TEXTS[1]), tokenizer.encode(TEXTS[1]))


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
