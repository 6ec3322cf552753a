"""Cases of the grids that compare pipelined engines with the sequential engine."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from helpers.engines import tiny
from maxpipe.config import Config

ROWS = 96  # a multiple of each grid's microbatches x data x fsdp

# Factors of every engine. `config_of` also reads: microbatches (per stage), mesh (names of the axes
# with two devices), gather, remat, remat_of ("iterations", "layers", both or "") and outside.
COMMON: Mapping[str, tuple[Any, ...]] = {
    "stages": (1, 2, 4),
    "repeats": (1, 2, 4),
    "layers": (1, 2),
    "packed": (True, False),
    "tied": (False, True),
    "dropout": (0.0, 0.2),
    "block": ("llama", "balanced"),
    "delay": (False, True),
    "uneven": (False, True),
    "scan": (True, False),
    "tiled": (False, True),
}

Case = Mapping[str, Any]


def chunk_sizes(case: Case) -> list[int]:
    """Return the layers of each chunk in model order; uneven chunks mix sizes one and two."""
    other = 3 - case["layers"]
    chunks = range(case["stages"] * case["repeats"])
    return [other if case["uneven"] and i % 3 == 1 else case["layers"] for i in chunks]


def config_of(case: Case, **values: Any) -> Config:
    chunks = chunk_sizes(case)
    number, _, place = case["outside"].partition(" ")
    common = {
        "pipeline.num_repeats": case["repeats"],
        "pipeline.layers_per_stage": chunks if case["uneven"] else [],
        "pipeline.num_microbatches": int(case["stages"] * case["microbatches"]),
        "pipeline.parallel_layers": sum(chunks),
        "pipeline.outside_layers": place or "after",
        "pipeline.delay_activation_forwarding": case["delay"],
        "pipeline.fsdp_gather": case["gather"],
        "pipeline.scan_layers_per_stage": case["scan"],
        "pipeline.remat_policy": case["remat"],
        "pipeline.remat_iterations": "iterations" in case["remat_of"],
        "pipeline.remat_layers": "layers" in case["remat_of"],
        "model.block": case["block"],
        "model.num_layers": sum(chunks) + int(number or 0),
        "model.tie_embeddings": case["tied"],
        "model.dropout": case["dropout"],
        # Tied with `tied` so that half of the cases have these parameters.
        "model.qk_norm": case["tied"],
        "model.attention_bias": case["tied"],
        "model.z_loss": 1e-2,
        "model.logit_soft_cap": 5.0,
        "model.logit_tiles": 3 if case["tiled"] else 1,
        "data.global_batch_size": ROWS,
        "mesh.ici.stage": case["stages"],
    }
    return tiny(**common | {f"mesh.ici.{axis}": 2 for axis in case["mesh"].split()} | values)


def name_of(case: Case) -> str:
    """Return a test id: sizes, options that are on, chosen variants."""
    words = ["S{stages}-V{repeats}-L{layers}-M{microbatches}S".format(**case)]
    for name, value in case.items():
        if isinstance(value, str):
            words += value.split()
        elif isinstance(value, bool | float) and value and name != "microbatches":
            words.append(name)
    return "-".join(words)


def named(cases: Iterable[Case]) -> Iterator[object]:
    for case in cases:
        yield pytest.param(case, id=name_of(case))


def every_nth(cases: Iterable[Case], n: int) -> Iterator[object]:
    """Yield the cases of a product as parameters, marked `product` but for every n-th.

    CI runs those without the mark; `n` is coprime to the numbers of options, so that they occur in
    turn.
    """
    for number, case in enumerate(cases):
        marks = [pytest.mark.product] if number % n else []
        yield pytest.param(case, marks=marks, id=name_of(case))
