"""Open the texts named on a command line: text, JSON lines, parquet, ArrayRecord."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents, open_all
from maxpipe.data.files import find_files, reworded

TEXT = "text"  # the source of files of no other kind
FILES = "FILES"  # the argument's name in messages
HOLDS_TOKENS = "holds token ids already; give texts"


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
    """Return the corpus of files, directories, globs and URLs; file endings decide its kind.

    Raises ConfigError if a word matches no file, or the files are of several kinds.
    """
    path = ",".join(words)
    with naming_files():
        files = find_files(path, SOURCES[TEXT].suffixes, cache_dir)
    endings = {
        source: facts.suffixes
        for source, facts in SOURCES.items()
        if facts.needs_path
        and any(facts.suffixes)
        and source != TEXT
        and not (facts.is_chat or facts.has_column)
    }
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
