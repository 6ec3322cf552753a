"""Open the texts that words of a command line name: text, JSON lines, parquet, ArrayRecord."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents, open_documents
from maxpipe.data.files import find_files

TEXT = "text"  # the source of files of no other kind
FILES = "FILES"  # the argument, for messages


@dataclass(frozen=True)
class Corpus:
    """Texts, as `data.source` and `data.path` of a run name them; picklable, for processes.

    Attributes:
      source: `data.source`.
      files: in the order of the documents.
      cache_dir: `data.cache_dir`.
    """

    source: str
    files: tuple[str, ...]
    cache_dir: str = ""

    def open(self, *, in_pieces: bool) -> Documents:
        """Return the documents.

        Args:
          in_pieces: whether a single text file is read in pieces, as by a run that holds out a
            share of it.

        Raises:
          ConfigError: a file is empty, damaged, or of another kind.
        """
        config = DataConfig(source=self.source, path=",".join(self.files), cache_dir=self.cache_dir)
        if not (in_pieces and self.source == TEXT and len(self.files) == 1):
            config = replace(config, eval_fraction=0.0, eval_path="")
            with naming_files():
                return open_documents(config, "train")
        # A share may be held out of pieces, but here all of them are wanted.
        with naming_files():
            return open_documents(replace(config, eval_path=self.files[0]), "train")


def find_corpus(words: Sequence[str], cache_dir: str = "") -> Corpus:
    """Return the corpus of files, directories, globs and URLs; its kind is that of the endings.

    Raises:
      ConfigError: a word matches no file, or the files are of several kinds.
    """
    with naming_files():
        files = find_files(",".join(words), cache_dir=cache_dir)
    endings = {
        source: facts.suffixes
        for source, facts in SOURCES.items()
        if facts.needs_path and any(facts.suffixes) and source != TEXT and not facts.is_chat
    }
    kinds: dict[str, str] = {}
    for file in files:
        kind = next((name for name, ends in endings.items() if file.endswith(ends)), TEXT)
        kinds.setdefault(kind, file)
    if "token_bin" in kinds:
        message = f"{kinds['token_bin']} holds token ids already; give texts"
        raise ConfigError(Problem(FILES, message))
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} such as {file}" for kind, file in sorted(kinds.items()))
        raise ConfigError(Problem(FILES, f"are of several kinds: {shown}; take one at a time"))
    (kind,) = kinds
    return Corpus(kind, tuple(files), cache_dir)


@contextmanager
def naming_files() -> Iterator[None]:
    """Call what is wrong with `data.path` by the name that the command line has for it."""
    try:
        yield
    except ConfigError as error:
        problems = [
            replace(problem, key=FILES if problem.key == "data.path" else problem.key)
            for problem in error.problems
        ]
        raise ConfigError(*problems) from error
