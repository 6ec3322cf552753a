"""Look at data before a run reads it: `maxpipe.data show|check CONFIG.yml key=value ...`.

`show` prints a few rows as text, one line per segment, and measures the loader. `check` reads every
document once and names those that would end a run. Neither builds a model. Exit codes: 0; 1 if
`check` found such a document; 2 if the configuration or the data is wrong.
"""

if __name__ == "__main__":
    from maxpipe import ctrl_c

    ctrl_c.expect()

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.cli import exit_on_config_error, number_flag, parse_args
from maxpipe.config.load import derive_known
from maxpipe.config.terminal import GREEN, RESET, wants_colour
from maxpipe.data.check import check
from maxpipe.data.loader import make_loader
from maxpipe.data.tokenizers import Tokenizer, decode_all, load_tokenizer

if TYPE_CHECKING:
    from maxpipe.data.rows import Batch

PROG = "python -m maxpipe.data"
DESCRIPTIONS = {
    "show": (
        "Prints rows of data as a run would see them, and measures the loader. No model is built. "
        "`check` in place of `show` reads every document and names those that would end a run."
    ),
    "check": (
        "Reads every document once and names those that would end a run; exit code 1 if there are "
        "any. No model is built."
    ),
}


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = "show"
    if words[:1] and words[0] in DESCRIPTIONS:
        command = words.pop(0)
    elif words[:1] not in (["--help"], ["-h"]):
        message = f"the commands are: {PROG} show|check CONFIG.yml key=value ..."
        raise ConfigError(Problem("", message))
    arguments = parse_args(
        words,
        prog=f"{PROG} {command}",
        description=DESCRIPTIONS[command],
        add_flags=_add_flags if command == "show" else None,
    )
    config = derive_known(arguments.loaded.config)
    if command == "check":
        return check(config)
    show(config, arguments.flags.rows, arguments.flags.seconds)
    return 0


def show(config: Config, num_rows: int, seconds: float) -> None:
    """Print the first `num_rows` rows, then the speed of the loader over `seconds`."""
    loader = make_loader(config, "train", range(config.data.global_batch_size))
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.cache_dir)
    for number in range(num_rows):
        step, row = divmod(number, config.data.global_batch_size)
        if row == 0:
            batch = next(loader)
            if num_rows > config.data.global_batch_size:
                print(f"batch {step}")
        print(*describe_row(batch, row, tokenizer, wants_colour(sys.stdout)), sep="\n")
    # Batches that were prefetched while the rows were printed must not count.
    for _ in range(config.data.prefetch + 1):
        next(loader)
    print(_measure(loader, config, seconds))
    loader.close()


def describe_row(
    batch: "Batch", row: int, tokenizer: Tokenizer, colour: bool = False
) -> Iterator[str]:
    """Yield a row as lines: its size, then number, token range and text of each segment.

    Where not all of a row is learned, what is learned stands between ⟦ and ⟧, or is green.
    """
    segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
    padding = int((segments == 0).sum())
    yield f"row {row}: {len(tokens)} tokens, {segments.max()} segments, {padding} of padding"
    for segment in range(1, segments.max() + 1):
        where = np.flatnonzero(segments == segment)
        weights = batch["weights"][row][where]
        if weights.all():
            text = repr(tokenizer.decode(tokens[where]))
        else:
            ids = np.append(tokens[where], batch["targets"][row][where[-1]])
            text = _marked(ids, np.append(0, weights), tokenizer, colour)
        yield f"  segment {segment}, tokens {where[0]}-{where[-1]}: {text}"


def _marked(ids: np.ndarray, weights: np.ndarray, tokenizer: Tokenizer, colour: bool) -> str:
    """Return the text of `ids` with the stretches whose weight is not 0 marked."""
    before, after = (GREEN, RESET) if colour else ("⟦", "⟧")
    stretches = np.split(ids, np.flatnonzero(np.diff(weights != 0)) + 1)
    texts = [decode_all(tokenizer, stretch) for stretch in stretches]
    shown = [repr(text)[1:-1] for text in texts]
    first = int(weights[0] == 0)  # learned and other stretches take turns
    shown[first::2] = [f"{before}{text}{after}" for text in shown[first::2]]
    return "".join(shown)


def _measure(loader: "Iterator[Batch]", config: Config, seconds: float) -> str:
    """Return the loader's tokens per second and how well its rows are filled, as text."""
    began = time.perf_counter()
    batches = filled = segments = 0  # `filled` tokens are not padding
    while not batches or time.perf_counter() - began < seconds:
        batch = next(loader)
        batches += 1
        filled += int((batch["segment_ids"] > 0).sum())
        segments += int(batch["segment_ids"].max(axis=1).sum())
    rows = batches * config.data.global_batch_size
    tokens = rows * config.data.sequence_length
    elapsed = time.perf_counter() - began
    workers = config.data.num_workers
    how = f"data.num_workers={workers}" if workers else "a thread of this process"
    return (
        f"{batches} batches in {elapsed:.1f} s: {tokens / elapsed:,.0f} tokens/s with {how}\n"
        f"packing efficiency {filled / tokens:.1%}: the share of tokens that are not padding\n"
        f"{segments / rows:.2f} segments a row, {filled / segments:.1f} tokens a segment"
    )


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add, rows, seconds = parser.add_argument, number_flag(int, 1), number_flag(float, 0)
    add("--rows", type=rows, default=3, metavar="N", help="rows to print; default %(default)s")
    add("--seconds", type=seconds, default=2.0, metavar="S", help="how long to measure; default 2")


if __name__ == "__main__":
    ctrl_c.run(main)
