"""Make tokens: `python -m maxpipe.tokenize train FILES... --vocab-size 8k --out tokenizer.json`.

`train` trains a byte-level BPE tokenizer; `encode` writes token files, from which training reads
without encoding anything. FILES are files, directories, globs and URLs, as for data.path; quote a
glob, and the command expands it. Exit codes: 0; 2 if the command line or a text is wrong; 130 after
Ctrl-C, after which the same `encode` goes on.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from maxpipe.config.cli import check_flags, exit_on_config_error
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import add_import_flag, import_variants
from maxpipe.config.outputs import check_local
from maxpipe.config.sections import DataConfig
from maxpipe.config.terminal import emit
from maxpipe.config.values import number
from maxpipe.data.corpus import LEAST_SIZE, check_target, find_corpus, train_tokenizer
from maxpipe.data.encoding import Encoding, encode_parts, summary
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.telemetry.console import open_bar


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    flags = _parser().parse_args(argv)
    check_flags(flags, "out")
    check_local("--cache-dir", flags.cache_dir)
    check_local("--out", flags.out)
    import_variants(flags.imports)
    return _train(flags) if flags.action == "train" else _encode(flags)


def _train(flags: argparse.Namespace) -> int:
    size, out = _vocab_size(flags.vocab_size), Path(flags.out)
    corpus = find_corpus(flags.files, flags.cache_dir)
    check_target(out)
    count, num_documents, num_bytes = train_tokenizer(
        corpus, size, out, shows_progress=sys.stderr.isatty()
    )
    emit(f"read {num_documents:,} documents, {num_bytes:,} bytes of {len(corpus.files):,} files")
    if count < size:
        emit(f"the texts give {count:,} tokens, not {size:,}: give more of them")
    emit(f"wrote {out}: {count:,} tokens")
    words = [f"data.tokenizer={out}", f"model.vocab_size={count}"]
    emit(f"train with {shlex.join(words)}")
    return 0


def _encode(flags: argparse.Namespace) -> int:
    out = Path(flags.out)
    for name in ("workers", "sequence_length"):
        if (value := getattr(flags, name)) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(Problem(flag, f"expected at least 1; got {value}"))
    try:
        tokenizer = load_tokenizer(flags.tokenizer, flags.cache_dir)
    except ConfigError as error:
        problems = (Problem("--tokenizer", problem.message) for problem in error.problems)
        raise ConfigError(*problems) from None
    corpus = find_corpus(flags.files, flags.cache_dir, flags.sequence_length)
    encoding = Encoding(
        corpus,
        flags.tokenizer,
        out,
        skips_bad=flags.on_bad_document == "skip",
        imports=tuple(flags.imports),
    )
    parts = encoding.parts()
    encoding.begin()
    missing = [part for part in parts if not encoding.is_done(part)]
    if len(missing) < len(parts):
        emit(f"{len(parts) - len(missing)} of {len(parts)} files are there already")
    total = sum(part.end - part.start for part in missing)
    with open_bar(
        sys.stderr, total=total, unit=" documents", disable=not sys.stderr.isatty()
    ) as bar:
        for count, (part, skipped) in enumerate(encode_parts(encoding, missing, flags.workers), 1):
            bar.update(part.end - part.start)
            for reason in skipped:
                bar.write(f"left out: {reason}", file=sys.stderr)
            if bar.disable:
                emit(f"{count} of {len(missing)}: {part.name}.bin")
    num_documents, num_tokens = summary(encoding, parts)
    if not num_documents:
        raise ConfigError(Problem("FILES", "hold no text"))
    emit(f"wrote {encoding.out}: {num_documents:,} documents, {num_tokens:,} tokens")
    words = ["data.source=token_bin", f"data.path={encoding.out}"]
    words += [f"data.tokenizer={flags.tokenizer}", f"model.vocab_size={tokenizer.vocab_size}"]
    if corpus.is_cut:
        emit(
            f"one text file, cut into documents as for data.sequence_length={flags.sequence_length}"
        )
        words.append(f"data.sequence_length={flags.sequence_length}")
    emit(f"train with {shlex.join(words)}")
    return 0


def _vocab_size(text: str) -> int:
    """Return the value of --vocab-size, which may be written 8k or 32Ki.

    Raises:
      ConfigError: it is not a whole number, or out of bounds.
    """
    try:
        value = number(text)
    except ValueError:
        value = None
    if value is None or value != int(value) or not LEAST_SIZE <= value <= 1 << 24:
        message = (
            f"expected a whole number of at least {LEAST_SIZE}, 256 bytes and the end of a "
            f"document, such as 8k; got {text}"
        )
        raise ConfigError(Problem("--vocab-size", message))
    return int(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.tokenize",
        description="Train a tokenizer, or encode texts into token files.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    helps = {
        "train": "train a byte-level BPE tokenizer",
        "encode": "write token files, in parallel; the same command goes on where it was stopped",
    }
    for action, text in helps.items():
        inner = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        add = inner.add_argument
        add("files", nargs="+", metavar="FILES", help="files, directories, globs, URLs of texts")
        if action == "train":
            add("--vocab-size", required=True, metavar="N", help=f"tokens, at least {LEAST_SIZE}")
            add("--out", default="tokenizer.json", metavar="FILE", help="default: %(default)s")
        else:
            add("--tokenizer", required=True, metavar="PATH", help="as data.tokenizer")
            add("--out", required=True, metavar="DIR", help="a new directory of token files")
            add(
                "--workers",
                type=int,
                default=os.cpu_count() or 1,
                metavar="N",
                help="processes; default: one for each core",
            )
            add(
                "--sequence-length",
                type=int,
                default=DataConfig.sequence_length,
                metavar="N",
                help="as data.sequence_length, by which a single text file is cut; "
                "default: %(default)s",
            )
            add(
                "--on-bad-document",
                choices=("stop", "skip"),
                default="stop",
                help="what a text that cannot be read does; default: %(default)s",
            )
        add("--cache-dir", default="", metavar="DIR", help="as data.cache_dir")
        add_import_flag(inner)
    return parser


if __name__ == "__main__":
    ctrl_c.run(main)
