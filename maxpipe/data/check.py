"""Read every document of a run once, to find those that would end it hours later."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import Config
from maxpipe.data.documents import (
    BadDocument,
    Documents,
    EncodedDocuments,
    MarkedText,
    Split,
)
from maxpipe.data.loader import check_base_tokenizer, open_tokenizer

SOUND, FOUND = 0, 1  # exit codes
NAMED = 10  # how many problems are printed
_SECONDS_BETWEEN_REPORTS = 5


@dataclass
class Findings:
    """What a scan of one split's documents found.

    Attributes:
      documents, empty: number of documents, and of those that are empty.
      tokens: number of tokens as the model reads them.
      targets, learned: number of tokens to predict, and of those that training learns.
      texts: number of documents that are text rather than token ids.
      not_utf8: number of documents that cannot be read because they are not UTF-8.
      bad: number of documents that cannot be read as text or token ids.
      fatal: number of other errors, which end a run even with data.on_bad_document=skip.
      problems: messages for users about the first `NAMED` bad documents and other errors.
    """

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    targets: int = 0
    learned: int = 0
    texts: int = 0
    not_utf8: int = 0
    bad: int = 0
    fatal: int = 0
    problems: list[str] = field(default_factory=list)


def check(config: Config) -> int:
    """Read all documents of both splits and print what is wrong with them.

    Returns:
      `SOUND`, or `FOUND` if a document would end a run of this configuration.

    Raises:
      ConfigError: files are missing or unusable, or a split is empty.
    """
    from maxpipe.data.mixture import open_mixture

    tokenizer = open_tokenizer(config)
    check_base_tokenizer(config)
    splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
    ends_the_run = False
    for split in splits:
        documents, _ = open_mixture(config.data, split, config.seed)
        encoder = EncodedDocuments(documents, tokenizer, config.model.num_token_ids)
        row = None if config.data.packing or split == "eval" else config.data.sequence_length
        findings = scan(documents, encoder, report_progress(split, len(documents)), row)
        skips = config.data.on_bad_document == "skip"
        print(*_describe(split, findings, skips), sep="\n")
        ends_the_run |= bool(findings.fatal or (findings.bad and not skips))
        ends_the_run |= findings.bad + findings.empty == findings.documents
    return FOUND if ends_the_run else SOUND


def scan(
    documents: Documents,
    encoder: EncodedDocuments,
    progress: Callable[[int], None],
    row: int | None = None,
) -> Findings:
    """Read and encode each document once.

    Args:
      documents: the documents of one split.
      encoder: encoder that turns them into tokens.
      progress: function that is called with the number of documents read so far.
      row: number of tokens to which training cuts a document; None if it reads all of it.
    """
    findings = Findings(documents=len(documents))
    for index in range(len(documents)):
        progress(index)
        problem = ""
        try:
            document = documents[index]
            findings.texts += isinstance(document, str | MarkedText)
            findings.empty += not len(document)
            encoded = encoder.encode(document)
            findings.tokens += len(encoded.ids)
            findings.targets += max(len(encoded.ids) - 1, 0)
            findings.learned += int(np.count_nonzero(encoded.weights[1:][:row]))
        except BadDocument as error:
            findings.bad += 1
            findings.not_utf8 += _is_not_utf8(error)
            problem = str(error)
        except ConfigError as error:
            findings.fatal += 1
            problem = str(error)
        if problem and len(findings.problems) < NAMED:
            findings.problems.append(problem)
    return findings


def _is_not_utf8(error: BaseException | None) -> bool:
    """Return whether an error was raised because bytes are not UTF-8."""
    while error is not None and not isinstance(error, UnicodeDecodeError):
        error = error.__cause__
    return error is not None


def _describe(split: Split, findings: Findings, skips: bool) -> Iterator[str]:
    """Yield lines about a split."""
    empty = f", {findings.empty:,} of them empty" if findings.empty else ""
    learned = f", {findings.learned:,} of them learned" * (findings.learned < findings.targets)
    yield f"{split}: {findings.documents:,} documents{empty}; {findings.tokens:,} tokens{learned}"
    if findings.texts or findings.not_utf8:
        share = 1 - findings.not_utf8 / findings.documents
        shown = "100 %" if share == 1 else f"{100 * min(share, 0.9999):.2f} %"
        yield f"  {shown} of the documents are UTF-8"
    yield from (f"  {problem}" for problem in findings.problems)
    more = findings.bad + findings.fatal - len(findings.problems)
    if more:
        yield f"  and {more:,} more"
    if findings.bad and skips:
        yield f"  {findings.bad:,} cannot be read; data.on_bad_document=skip leaves them out"
    elif findings.bad:
        yield (
            f"  {findings.bad:,} cannot be read: the run would end there; mend them, or leave them "
            "out with data.on_bad_document=skip"
        )
    if findings.fatal:
        yield f"  {findings.fatal:,} would end the run with any data.on_bad_document"


def report_progress(what: str, total: int) -> Callable[[int], None]:
    """Return a function that prints every few seconds how many documents were read."""
    last = time.monotonic()

    def report(count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            print(f"{what}: {count:,} of {total:,} documents", file=sys.stderr, flush=True)

    return report
