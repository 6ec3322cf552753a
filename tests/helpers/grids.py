"""Cases of the grids that compare pipelined engines with the sequential engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from helpers.engines import EngineUnderTest, assert_same, make_batch, reference, tiny
from maxpipe.config import Config, catalog

# A block with an auxiliary loss, for tests only.
catalog.BLOCKS["balanced"] = catalog.Block("helpers.balanced_block:BalancedBlock")

ROWS = 96  # a multiple of each grid's microbatches x data x fsdp

# Factors of every engine. `config_of` also reads: microbatches (per stage), mesh (names of the axes
# with two devices), gather, remat, and remat_of ("iterations", "layers", both or "").
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
    """Return the configuration of a case, with the engine's own `values`."""
    chunks = chunk_sizes(case)
    common = {
        "pipeline.num_repeats": case["repeats"],
        "pipeline.layers_per_stage": chunks if case["uneven"] else [],
        "pipeline.num_microbatches": int(case["stages"] * case["microbatches"]),
        "pipeline.delay_activation_forwarding": case["delay"],
        "pipeline.fsdp_gather": case["gather"],
        "pipeline.scan_layers_per_stage": case["scan"],
        "pipeline.remat_policy": case["remat"],
        "pipeline.remat_iterations": "iterations" in case["remat_of"],
        "pipeline.remat_layers": "layers" in case["remat_of"],
        "model.block": case["block"],
        "model.num_layers": sum(chunks),
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


def assert_equals_sequential(config: Config, case: Case, **options: Any) -> None:
    """Assert that the pipeline's loss and gradients equal those of the sequential engine."""
    actual = EngineUnderTest(config, **options).train(make_batch(ROWS, packed=case["packed"]))
    model = replace(config.model, logit_tiles=1)
    assert_same(actual, reference(model, ROWS, packed=case["packed"]))


def default_first(cases: Sequence[Case], n: int) -> Iterator[object]:
    """Yield the cases of a covering array as parameters, marked `slow` after the first n.

    The array is built greedily, so that its first cases cover most pairs of options.
    """
    for number, case in enumerate(cases):
        marks = [pytest.mark.slow] if number >= n else []
        yield pytest.param(case, marks=marks, id=name_of(case))


def every_nth(cases: Iterable[Case], n: int) -> Iterator[object]:
    """Yield the cases of a product as parameters, marked `product` but for every n-th.

    CI runs those without the mark; `n` is coprime to the numbers of options, so that they occur in
    turn.
    """
    for number, case in enumerate(cases):
        marks = [pytest.mark.product] if number % n else []
        yield pytest.param(case, marks=marks, id=name_of(case))
