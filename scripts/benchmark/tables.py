"""Predict the programs of docs/benchmarks.md anew, a table each, without a chip.

    python scripts/benchmark/tables.py [weights_in_steps weights_prepared_once residual_stream
        mixtures whole_mixtures]

Needs libtpu. A program takes one to several minutes; `predict_maxtext.py` prints the table next to
MaxText.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import predict

V5P = "compile.topology=v5p:2x2x2"
V6E = "compile.topology=v6e:2x4"
BFLOAT16 = "model.dtype=bfloat16 eval.every=0"
TOKENS = f"data.sequence_length=2048 data.global_batch_size=32 {BFLOAT16}"
LONG = f"data.sequence_length=8192 data.global_batch_size=16 {BFLOAT16}"
# The two commands of the page.
FIRST = (
    "configs/base.yml model.embed_dim=2048 model.num_query_heads=16 model.num_kv_heads=16 "
    "model.head_dim=128 model.mlp_dim=8192 model.num_layers=16 model.vocab_size=32000"
)
SECOND = (
    "configs/base.yml model.embed_dim=3072 model.num_query_heads=24 model.num_kv_heads=8 "
    "model.head_dim=128 model.mlp_dim=8192 model.num_layers=8 model.vocab_size=32768 "
    f"model.logit_tiles=4 pipeline.remat_policy=minimal {TOKENS}"
)
QWEN3 = (
    f"configs/models/qwen3-30b-a3b.yml model.num_layers=8 data.global_batch_size=32 {V5P} "
    "pipeline.num_repeats={} pipeline.num_microbatches={}"
)

EIGHT = "mesh.ici.stage=8 mesh.ici.fsdp=1"
FOUR = (
    "mesh.ici.stage=4 mesh.ici.fsdp={} pipeline.num_repeats=2 pipeline.num_microbatches=8 "
    "pipeline.schedule={}"
)
TWO = (
    "mesh.ici.stage=2 mesh.ici.fsdp=4 pipeline.num_repeats=2 pipeline.num_microbatches=8 "
    f"pipeline.schedule=interleaved_1f1b {V5P}"
)
TENSOR = (
    "mesh.ici.stage=4 mesh.ici.fsdp=1 mesh.ici.tensor=2 pipeline.num_repeats=1 "
    f"pipeline.num_microbatches=8 pipeline.schedule=1f1b {V6E}"
)
EIGHT_ONCE = f"{EIGHT} pipeline.num_repeats=1 pipeline.num_microbatches=16 {V5P}"
EIGHT_TWICE = f"{EIGHT} {V5P} pipeline.num_repeats=2 pipeline.schedule=lockstep_1f1b"
PAIR = "mesh.ici.stage=2 mesh.ici.fsdp=4"
EXPERTS = "mesh.ici.stage=2 mesh.ici.fsdp=1 mesh.ici.expert=4"


def each(configurations: Sequence[str], key: str, values: Sequence[str]) -> list[str]:
    return [f"{words} {key}={value}" for words in configurations for value in values]


# Four stages of rings of 2, 4, 8 and 16 devices, which have as many tokens each.
CUBES, SQUARES = ("2x2x2", "2x2x4", "2x4x4", "4x4x4"), ("2x4", "4x4", "4x8", "8x8")
RINGS = [
    f"{FIRST} data.sequence_length=2048 data.global_batch_size={16 * size} {BFLOAT16} "
    f"compile.topology={chip}:{slices[i]} {FOUR.format(size, 'lockstep_1f1b')} "
    "pipeline.fsdp_gather=per_iteration"
    for i, size in enumerate((2, 4, 8, 16))
    for chip, slices in (("v5p", CUBES), ("v6e", SQUARES), ("v5e", SQUARES))
]

TABLES = {
    "weights_in_steps": each(RINGS, "pipeline.fsdp_prefetch", ("false", "true")),
    "weights_prepared_once": each(
        [
            f"{SECOND} {EIGHT_ONCE} pipeline.schedule=1f1b",
            f"{SECOND} {TWO}",
            f"{SECOND} {TENSOR}",
            f"{SECOND} {EIGHT_ONCE} pipeline.schedule=lockstep_1f1b",
        ],
        "pipeline.fsdp_gather",
        ("per_iteration", "auto"),
    ),
    "residual_stream": [
        f"{FIRST} {TOKENS} {FOUR.format(2, 'lockstep_1f1b')} {V5P}",
        f"{FIRST} {TOKENS} {FOUR.format(2, 'lockstep_1f1b')} {V5P} pipeline.remat_policy=minimal",
        f"{FIRST} {TOKENS} {FOUR.format(2, 'circular')} {V5P}",
        f"{FIRST} {TOKENS} {EIGHT_TWICE} pipeline.num_microbatches=32",
        f"{FIRST} {LONG} {EIGHT_TWICE} pipeline.num_microbatches=16",
        f"{SECOND} {TWO}",
    ],
    "mixtures": [
        f"{QWEN3.format(1, 2)} mesh.ici.fsdp=8",
        f"{QWEN3.format(1, 2)} mesh.ici.fsdp=2 mesh.ici.expert=4",
        f"{QWEN3.format(2, 4)} {PAIR} pipeline.schedule=lockstep_1f1b",
        f"{QWEN3.format(2, 4)} {EXPERTS} pipeline.schedule=lockstep_1f1b",
        f"{QWEN3.format(2, 8)} {PAIR} pipeline.schedule=circular pipeline.fsdp_gather=per_repeat",
    ],
    "whole_mixtures": [
        f"configs/models/{name}.yml" for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables that are asked for; 1 if some program could not be predicted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    options = parser.parse_args(argv)
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table {min(unknown)}; there are: {', '.join(TABLES)}")
    code = 0
    for name in options.tables or TABLES:
        print(f"\n{name}", flush=True)
        code |= predict.main(TABLES[name])
    return code


if __name__ == "__main__":
    sys.exit(main())
