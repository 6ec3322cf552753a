"""`data.*` and `eval.*`: where rows come from."""

from dataclasses import dataclass
from typing import Any

from maxpipe.config.catalog import SOURCES
from maxpipe.config.sections.fields import option


@dataclass(frozen=True)
class DataConfig:
    source: str = option("python_stdlib", "where documents come from", variants=SOURCES)
    path: str = option(
        "",
        "file, directory or glob of the source (comma-separated for several); s3:// and gs:// as well",
    )
    mixture: list[dict[str, Any]] = option(  # noqa: RUF009
        [],
        "several sources instead of one: a list of {source, path, weight}, weight = share of the documents",
    )
    cache_dir: str = option(
        "", "local copies of remote, compressed and parquet files; empty = ~/.cache/maxpipe"
    )
    tokenizer: str = option(
        "byte", "byte, or the path of a Hugging Face tokenizer.json or of a SentencePiece .model"
    )
    global_batch_size: int = option(
        32, "sequences per step over all devices", minimum=1, maximum=2**24
    )
    sequence_length: int = option(128, "tokens per sequence", minimum=1)
    packing: bool = option(
        True, "fill each sequence with several documents; false = one document a sequence, padded"
    )
    shuffle: bool = option(True, "a new order of documents each epoch, from seed")
    eval_fraction: float = option(
        0.02, "share of documents kept for evaluation", minimum=0, maximum=0.5
    )
    num_workers: int = option(
        0, "worker processes that prepare batches; 0 = a thread of this process", minimum=0
    )
    prefetch: int = option(4, "batches prepared ahead", minimum=1)


@dataclass(frozen=True)
class EvalConfig:
    every: int = option(50, "evaluate after every so many steps; 0 = never", minimum=0)
    batches: int = option(2, "batches per evaluation", minimum=1)
    global_batch_size: int = option(
        -1, "sequences per evaluation batch; -1 = data.global_batch_size", minimum=1, derived=True
    )
