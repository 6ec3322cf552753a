"""Read every document of a run once, to find those that would end it hours later, or to count what
an epoch has. Imports no JAX.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Iterator

import numpy as np

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.load import Loaded, derive_known, replace
from maxpipe.config.sections import Config
from maxpipe.data.documents import (
    BadDocument,
    Documents,
    EncodedDocuments,
    MarkedText,
    Split,
    open_sources,
)
from maxpipe.data.loader import check_base_tokenizer, encoder_of, open_tokenizer

SOUND, FOUND = 0, 1  # exit codes
NAMED = 10  # how many problems are printed
_SECONDS_BETWEEN_REPORTS = 5


@dataclasses.dataclass
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
    problems: list[str] = dataclasses.field(default_factory=list)


def check(config: Config) -> int:
    """Read all documents of both splits, print what is wrong with them, and return `FOUND` if one
    would end a run of this configuration. Raises ConfigError if files are missing or unusable.
    """
    from maxpipe.data.rows import open_mixture

    open_tokenizer(config)
    check_base_tokenizer(config)
    splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
    ends_the_run = False
    for split in splits:
        documents, _ = open_mixture(config.data, split, config.seed)
        encoder = encoder_of(config, documents, skips_bad=False)
        row = None if config.data.packing or split == "eval" else config.data.sequence_length
        findings = _scan(documents, encoder, split, row)
        skips = config.data.on_bad_document == "skip"
        print(*_describe(split, findings, skips), sep="\n")
        ends_the_run |= bool(findings.fatal or (findings.bad and not skips))
        ends_the_run |= findings.bad + findings.empty == findings.documents
    return FOUND if ends_the_run else SOUND


def _scan(
    documents: Documents, encoder: EncodedDocuments, split: Split, row: int | None
) -> Findings:
    """Read and encode each document of a split once; `row` is the number of tokens to which
    training cuts a document.
    """
    findings = Findings(documents=len(documents))
    for index in _each(split, len(documents)):
        try:
            document = documents[index]
            findings.texts += isinstance(document, str | MarkedText)
            findings.empty += not len(document)
            encoded = encoder.encode(document)
            findings.tokens += len(encoded.ids)
            findings.targets += max(len(encoded.ids) - 1, 0)
            findings.learned += int(np.count_nonzero(encoded.weights[1:][:row]))
        except ConfigError as error:
            is_bad = isinstance(error, BadDocument)
            findings.bad += is_bad
            findings.fatal += not is_bad
            causes = (error.__cause__, error.__cause__ and error.__cause__.__cause__)
            findings.not_utf8 += any(isinstance(cause, UnicodeDecodeError) for cause in causes)
            findings.problems.append(str(error))
            del findings.problems[NAMED:]
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
    if more := findings.bad + findings.fatal - len(findings.problems):
        yield f"  and {more:,} more"
    if findings.bad:
        remedy = "data.on_bad_document=skip leaves them out"
        yield f"  {findings.bad:,} cannot be read{'' if skips else ': the run would end'}; {remedy}"
    if findings.fatal:
        yield f"  {findings.fatal:,} would end the run with any data.on_bad_document"


def with_steps(loaded: Loaded) -> Loaded:
    """Return the configuration with `steps` in place of `epochs`, and a remark that says so.

    The last step may go beyond the last epoch. Every process counts the same, as does every start
    of the run, unless documents have changed. Raises ConfigError if they are missing or unusable,
    or if there would be too many steps.
    """
    epochs, batch = loaded.config.epochs, loaded.config.data.global_batch_size
    if not epochs:
        return loaded
    # The schedule of the learning rate needs the steps before training begins, and a share of the
    # documents would only guess them.
    sequences, described = _epoch(derive_known(loaded.config))
    steps = max(1, math.ceil(epochs * sequences / batch))
    config = replace(loaded.config, steps=steps, epochs=0.0)
    remark = f"steps={steps}: {epochs:g} epochs of {described}"
    return dataclasses.replace(loaded, config=config, remarks=(*loaded.remarks, remark))


def _epoch(config: Config) -> tuple[float, str]:
    """Return the sequences that training makes of all documents, and a phrase for these."""
    data = config.data
    (documents,) = open_sources(data, "train")
    count = len(documents)
    described = f"{count:,} {'conversations' if SOURCES[data.source].is_chat else 'documents'}"
    if not data.packing:
        return count, described
    encoder = encoder_of(config, documents)
    # The first token is never a target.
    tokens = sum(max(len(encoder[index].ids) - 1, 0) for index in _each("epochs", count))
    return tokens / data.sequence_length, f"{described}, {tokens:,} tokens"


def _each(what: str, total: int) -> Iterator[int]:
    """Yield the numbers of documents, and print every few seconds how many were read."""
    last = time.monotonic()
    for count in range(total):
        if time.monotonic() - last >= _SECONDS_BETWEEN_REPORTS:
            last = time.monotonic()
            print(f"{what}: {count:,} of {total:,} documents", file=sys.stderr, flush=True)
        yield count
