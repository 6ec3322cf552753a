"""Memory of the fullest stage of the mpmd engine: of many candidates, and of each by its table."""

import numpy as np
import pytest

from maxpipe.config import Config, replace, resolve
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.plan.footprint import on_platform
from maxpipe.plan.search.block import block_of
from maxpipe.plan.search.candidate import candidate_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.pricing import price
from maxpipe.plan.search.search import Outcome
from maxpipe.plan.search.space import Space
from maxpipe.plan.stage_memory import StageMemory

SIZES = {
    "model.num_layers": 16,
    "model.embed_dim": 64,
    "model.num_query_heads": 8,
    "model.num_kv_heads": 4,
    "model.mlp_dim": 256,
    "model.vocab_size": 512,
    "data.sequence_length": 64,
    "data.global_batch_size": 32,
    "eval.every": 0,
    "compile.topology": "v5p:2x2x2",
}
MIXTURE = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.moe.mlp_dim": 64}
FIRST = MIXTURE | {"model.num_layers": 18, "model.first_dense_layers": 2}
DRAWN = 1  # candidates of each mesh and schedule


def drawn(config, facts):
    """Yield candidates of the mpmd engine on eight devices whose chunks are equal, at random."""
    space, legality, draw = Space(config, 8, 1, {}), Legality(config, 1), np.random.default_rng(7)
    machine = machine_of("v5p:2x2x2", 1, config)
    for grid in space.grids():
        if legality.of_mesh(grid):
            continue
        for engine, schedule in space.pipelines(grid.size("stage")):
            if engine != "mpmd":
                continue
            block = block_of(space, legality, grid, engine, schedule, 32)
            priced = price(block, legality, facts, machine, Outcome().fallen)
            if priced is None:
                continue
            legal = np.flatnonzero(priced.legal)
            for index in draw.choice(legal, min(DRAWN, len(legal)), replace=False):
                args = (priced.block, int(index), priced.memory, priced.seconds, facts)
                candidate = candidate_of(*args)
                if config.model.stacked_layers % (grid.size("stage") * candidate.repeats) == 0:
                    yield candidate


def by_table(candidate, config):
    """Return the bytes of the fullest stage."""
    resolved = resolve(candidate.config(config), 8, 1)
    resolved = on_platform(resolved, "tpu")
    memory = StageMemory(resolved, build_table(resolved), on_tpus=True)
    stages = candidate.grid.size("stage")
    layers = config.model.stacked_layers // (stages * candidate.repeats)
    return max(memory.bytes(stage, [layers] * candidate.repeats) for stage in range(stages))


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        ({"model.dtype": "bfloat16", "model.tie_embeddings": True}, 0.01),
        pytest.param(FIRST, 0.06, marks=pytest.mark.slow),
    ],
)
def test_memory_of_mpmd_is_that_of_the_fullest_stage(keys, tolerance):
    """But for the moments of different stages that are taken together."""
    config = replace(Config(), **SIZES | keys)
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    facts = Facts(config)
    schedules = set()
    for candidate in drawn(config, facts):
        expected = by_table(candidate, config)
        assert candidate.memory == pytest.approx(expected, rel=tolerance), candidate.updates()
        schedules.add(candidate.schedule)
    assert {"gpipe", "1f1b", "interleaved_zb", "zb_h2", "zb_v", "dualpipe_v"} <= schedules
