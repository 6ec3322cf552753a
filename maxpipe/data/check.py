"""Read every document of a run once, to find those that would end it hours later."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import Config
from maxpipe.data.documents import BadDocument, Documents, EncodedDocuments, MarkedText, Split
from maxpipe.data.loader import check_base_tokenizer, encoder_of, open_tokenizer

SOUND, FOUND = 0, 1  # exit codes
NAMED = 10  # how many problems are printed
_SECONDS_BETWEEN_REPORTS = 5


@dataclass
class Findings:
    """What a scan of one split's documents counted, and messages about the first bad ones."""

    documents: int = 0
    empty: int = 0  # documents
    tokens: int = 0
    targets: int = 0  # tokens to predict
    learned: int = 0  # of these
    texts: int = 0  # documents that are no token ids
    not_utf8: int = 0  # documents that cannot be read for this reason
    bad: int = 0  # documents that cannot be read as text or token ids
    fatal: int = 0  # other errors, which end a run even with data.on_bad_document=skip
    problems: list[str] = field(default_factory=list)


def check(config: Config) -> int:
    """Read all documents of both splits, print what is wrong with them, and return `FOUND` if one
    would end a run of this configuration. Raises ConfigError if files are missing or unusable.
    """
    from maxpipe.data.mixture import open_mixture

    open_tokenizer(config)
    check_base_tokenizer(config)
    splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
    ends_the_run = False
    for split in splits:
        documents, _ = open_mixture(config.data, split, config.seed)
        encoder = encoder_of(config, documents, skips_bad=False)
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
    """Read and encode each document of a split once; `progress` is called with the number read so
    far, and `row` is the number of tokens to which training cuts a document.
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
            cause: BaseException | None = error
            while cause and not isinstance(cause, UnicodeDecodeError):
                cause = cause.__cause__
            findings.not_utf8 += cause is not None
            problem = str(error)
        except ConfigError as error:
            findings.fatal += 1
            problem = str(error)
        if problem and len(findings.problems) < NAMED:
            findings.problems.append(problem)
    return findings


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
