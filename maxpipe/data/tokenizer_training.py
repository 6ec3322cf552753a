"""Train a byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2) on a corpus."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.data.corpus import Corpus, text_of
from maxpipe.data.tokenizer_json import TOKENIZER_CONFIG
from maxpipe.storage.local_files import write_atomically

END = "<|endoftext|>"
LEAST_SIZE = 257  # all bytes, and the end of document
_OUT = "--out"


class Trained(NamedTuple):
    """The result of training a tokenizer, and what was read for it."""

    vocab_size: int  # less than requested if the texts have no more merges
    num_documents: int
    num_bytes: int


def check_target(out: Path) -> None:
    """Raise ConfigError if a tokenizer cannot be written to `out`, or would replace one."""
    if out.suffix != ".json":
        message = f"{out} must end in .json, as data.tokenizer takes it: {out}.json"
        raise ConfigError(Problem(_OUT, message))
    for file in (out, out.with_name(TOKENIZER_CONFIG)):
        if file.exists():
            message = f"{file} exists, and a run may need it: choose another place, or delete it"
            raise ConfigError(Problem(_OUT, message))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make {out.parent}: {error.strerror}"
        raise ConfigError(Problem(_OUT, message)) from None


def train_tokenizer(corpus: Corpus, vocab_size: int, out: Path, *, shows_progress: bool) -> Trained:
    """Train a tokenizer and write it, next to a tokenizer_config.json that names its eos_token.

    Any text can be encoded, since every byte is a token, and decoding returns the same text. One of
    the `vocab_size` ids, at least `LEAST_SIZE`, ends a document. Raises ConfigError if a text
    cannot be read, or the file cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = corpus.open()
    counts = [0, 0]

    def texts() -> Iterator[str]:
        for index in range(len(documents)):
            text = text_of(documents, index)
            counts[0] += 1
            counts[1] += len(text.encode())
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=shows_progress,
    )
    tokenizer.train_from_iterator(texts(), trainer, length=len(documents))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    config_file = out.with_name(TOKENIZER_CONFIG)
    try:
        write_atomically(config_file, [json.dumps(config, indent=2).encode() + b"\n"])
        write_atomically(out, [tokenizer.to_str(pretty=True).encode() + b"\n"])
    except OSError as error:
        with suppress(OSError):
            config_file.unlink()  # alone it would only keep `check_target` from another attempt
        message = f"cannot write {out}: {error.strerror}"
        raise ConfigError(Problem(_OUT, message)) from None
    return Trained(tokenizer.get_vocab_size(), *counts)
