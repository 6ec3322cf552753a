"""Read every document of a run once, to find those that would end it hours later, or to count what
an epoch has. Imports no JAX.
"""

import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

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
    describe_held_out,
    open_sources,
)
from maxpipe.data.loader import check_base_tokenizer, encoder_of, open_tokenizer

SOUND, FOUND = 0, 1  # exit codes
NAMED = 10  # how many problems are printed
_SECONDS_BETWEEN_REPORTS = 5


def check(config: Config) -> int:
    """Read all documents of both splits, print what is wrong with them, and return `FOUND` if one
    would end a run of this configuration. Raises ConfigError if files are missing or unusable.
    """
    from maxpipe.data.rows import open_mixture

    open_tokenizer(config)
    check_base_tokenizer(config)
    splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
    ends_the_run, counts = False, dict[str, Counter[str]]()
    for split in splits:
        documents, _ = open_mixture(config.data, split, config.seed, rows=1)
        encoder = encoder_of(config, documents, skips_bad=False)
        row = None if config.data.packing or split == "eval" else config.data.sequence_length
        found, problems = _scan(documents, encoder, split, row)
        counts[split] = found
        skips = config.data.on_bad_document == "skip"
        print(*_describe(split, found, problems, skips), sep="\n")
        ends_the_run |= bool(found["fatal"] or (found["bad"] and not skips))
        ends_the_run |= found["bad"] + found["empty"] == found["documents"]
    if config.eval.every and not config.data.eval_path:
        held_out, whole = counts["eval"], counts["train"] + counts["eval"]
        share = 100 * held_out["tokens"] / max(whole["tokens"], 1)
        documents_held_out = describe_held_out(held_out["documents"], whole["documents"])
        print(f"held out: {documents_held_out}, {share:.1f} % of the tokens")
    return FOUND if ends_the_run else SOUND


def _scan(
    documents: Documents, encoder: EncodedDocuments, split: Split, row: int | None
) -> tuple[Counter[str], list[str]]:
    """Read and encode each document of a split once; `row` is the number of tokens to which
    training cuts a document. Returns what was counted, and messages about the first bad documents.

    `tokens` are all of them, `targets` those to predict, and `learned` those of a weight. `texts`
    are documents that are no token ids, `bad` those that cannot be read as one or the other, and
    `fatal` those whose errors end a run even with data.on_bad_document=skip.
    """
    found, problems = Counter(documents=len(documents)), list[str]()
    for index in _each(split, len(documents)):
        try:
            document = documents[index]
            encoded = encoder.encode(document)
        except ConfigError as error:
            found["bad" if isinstance(error, BadDocument) else "fatal"] += 1
            causes = (error.__cause__, error.__cause__ and error.__cause__.__cause__)
            found["not UTF-8"] += any(isinstance(cause, UnicodeDecodeError) for cause in causes)
            problems.append(str(error))
            del problems[NAMED:]
            continue
        found["texts"] += isinstance(document, str | MarkedText)
        found["empty"] += not len(document)
        found["tokens"] += len(encoded.ids)
        found["targets"] += max(len(encoded.ids) - 1, 0)
        found["learned"] += int(np.count_nonzero(encoded.weights[1:][:row]))
    return found, problems


def _describe(
    split: Split, found: Counter[str], problems: Sequence[str], skips: bool
) -> Iterator[str]:
    """Yield lines about a split."""
    empty = f", {found['empty']:,} of them empty" if found["empty"] else ""
    learned = f", {found['learned']:,} of them learned" * (found["learned"] < found["targets"])
    yield f"{split}: {found['documents']:,} documents{empty}; {found['tokens']:,} tokens{learned}"
    if found["texts"] or found["not UTF-8"]:
        share = 1 - found["not UTF-8"] / found["documents"]
        shown = "100 %" if share == 1 else f"{100 * min(share, 0.9999):.2f} %"
        yield f"  {shown} of the documents are UTF-8"
    yield from (f"  {problem}" for problem in problems)
    if more := found["bad"] + found["fatal"] - len(problems):
        yield f"  and {more:,} more"
    if found["bad"]:
        remedy = "data.on_bad_document=skip leaves them out"
        yield f"  {found['bad']:,} cannot be read{'' if skips else ': the run would end'}; {remedy}"
    if found["fatal"]:
        yield f"  {found['fatal']:,} would end the run with any data.on_bad_document"


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
