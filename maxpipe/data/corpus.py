"""Open the texts that a command line names, and train a tokenizer on them: byte-level BPE (Sennrich
et al. 2016; bytes as in GPT-2).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.outputs import check_new
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents, open_all
from maxpipe.data.files import find_files, reworded
from maxpipe.data.tokenizers import TOKENIZER_CONFIG
from maxpipe.storage.local_files import write_atomically

TEXT = "text"  # the source of files of no other kind
_KINDS = ("jsonl", "parquet", "array_record", "token_bin")
FILES = "FILES"  # the argument's name in messages
HOLDS_TOKENS = "holds token ids already; give texts"
END = "<|endoftext|>"
LEAST_SIZE = 257  # all bytes, and the end of document
_OUT = "--out"


@dataclass(frozen=True)
class Corpus:
    """Texts, as `data.*` of a run names them; picklable, for processes."""

    source: str
    path: str
    files: tuple[str, ...]  # in the order of the documents
    cache_dir: str = ""
    sequence_length: int = DataConfig.sequence_length  # sets the size of a single file's pieces

    @property
    def is_cut(self) -> bool:
        """Return whether it is a single text file, whose documents are pieces of it."""
        return self.source == TEXT and len(self.files) == 1

    def open(self) -> Documents:
        """Return all documents, including those that a run holds out."""
        keys = asdict(self)
        del keys["files"]
        with naming_files():
            return open_all(DataConfig(**keys))


def find_corpus(
    words: Sequence[str],
    cache_dir: str = "",
    sequence_length: int = DataConfig.sequence_length,
) -> Corpus:
    """Return the corpus of files, directories, globs and URLs, whose endings decide its kind;
    raises ConfigError if a word matches no file, or the files are of several kinds.
    """
    path = ",".join(words)
    with naming_files():
        files = find_files(path, SOURCES[TEXT].suffixes, cache_dir)
    endings = {name: SOURCES[name].suffixes for name in _KINDS}
    kinds: dict[str, str] = {}
    for file in files:
        kind = next((name for name, ends in endings.items() if file.lower().endswith(ends)), TEXT)
        kinds.setdefault(kind, file)
    if "token_bin" in kinds:
        raise ConfigError(Problem(FILES, f"{kinds['token_bin']} {HOLDS_TOKENS}"))
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} such as {file}" for kind, file in sorted(kinds.items()))
        raise ConfigError(Problem(FILES, f"are of several kinds: {shown}; take one at a time"))
    (kind,) = kinds
    return Corpus(kind, path, tuple(files), cache_dir, sequence_length)


def text_of(documents: Documents, index: int) -> str:
    """Return a document of a corpus; raises ConfigError if it cannot be read, or is not text."""
    with naming_files():
        document = documents[index]
    if not isinstance(document, str):  # parquet files may have either
        raise ConfigError(Problem(FILES, f"document {index} {HOLDS_TOKENS}"))
    return document


@contextmanager
def naming_files() -> Iterator[None]:
    """Report problems of `data.path` under the command line's name for it."""
    try:
        yield
    except ConfigError as error:
        keys = {"data.path": FILES}
        raise reworded(error, lambda p: replace(p, key=keys.get(p.key, p.key))) from error


def unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(Problem(_OUT, f"cannot write to {out}: {error.strerror}"))


def check_target(out: Path) -> None:
    """Raise ConfigError if a tokenizer cannot be written to `out`, or would replace one."""
    if out.suffix != ".json":
        message = f"{out} must end in .json, as data.tokenizer takes it: {out}.json"
        raise ConfigError(Problem(_OUT, message))
    for file in (out, out.with_name(TOKENIZER_CONFIG)):
        check_new(_OUT, file)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from None


def train_tokenizer(
    corpus: Corpus, vocab_size: int, out: Path, *, shows_progress: bool
) -> tuple[int, int, int]:
    """Train a tokenizer and write it, next to a tokenizer_config.json that names its eos_token.

    Returns its number of tokens, which is less than `vocab_size` if the texts have no more merges,
    and the numbers of documents and bytes that were read. Any text can be encoded, since every byte
    is a token. Raises ConfigError if a text cannot be read, or the file cannot be written.
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
        raise unwritable(out, error) from None
    return tokenizer.get_vocab_size(), counts[0], counts[1]
