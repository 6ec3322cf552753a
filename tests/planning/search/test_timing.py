"""What a step waits for and moves, by closed forms: who sums gradients when, and what is stored."""

import numpy as np
import pytest

from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.planning.search.block import block_of
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.sizes import BlockSizes
from maxpipe.planning.search.space import Space
from maxpipe.planning.search.timing import step_seconds

SIZES = {
    "model.num_layers": 8,
    "model.embed_dim": 64,
    "model.num_query_heads": 8,
    "model.mlp_dim": 1024,
    "model.vocab_size": 16,
    "data.sequence_length": 2,
    "data.global_batch_size": 64,
    "eval.every": 0,
    "pipeline.num_repeats": 1,
}


def priced(engine, schedule, **choices):
    """Return (sizes, seconds) of a block on four stages and two groups of devices."""
    config = replace(Config(), **SIZES)
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    mesh = {"stage": 4, "data": 2} | choices.pop("mesh", {})
    tried = {f"mesh.ici.{axis}": [size] for axis, size in mesh.items()}
    tried |= {"pipeline.num_repeats": [1], "pipeline.num_microbatches": [8, 16]}
    tried |= {f"pipeline.{key}": values for key, values in choices.items()}
    devices = int(np.prod([*mesh.values()]))
    space = Space(config, devices, 1, tried)
    (grid,) = space.grids()
    block = block_of(space, Legality(config, 1), grid, engine, schedule, 64)
    sizes = BlockSizes(block, Facts(config), None)
    return sizes, step_seconds(sizes, machine_of("v5p:2x2x2", 1, config))


@pytest.mark.parametrize(
    ("engine", "schedule", "gather", "grows"),
    [
        ("circular", "circular", "per_iteration", True),
        ("circular", "circular", "once", False),
        ("scheduled", "lockstep_1f1b", "per_iteration", False),
        ("mpmd", "1f1b", "per_iteration", False),
    ],
)
def test_gradients_of_shared_weights_are_summed_in_every_iteration_by_autodiff(
    engine, schedule, gather, grows
):
    """Sequences are so short that only weights take long to send."""
    choices = {"fsdp_gather": [gather], "remat_policy": ["full"], "mesh": {"data": 2}}
    _, seconds = priced(engine, schedule, **choices)
    eight, sixteen = np.broadcast_to(seconds.communication, (2, 1, 1, 1, 3))[:, 0, 0, 0, 0]
    assert (sixteen > 1.8 * eight) == grows
    assert (sixteen < 1.2 * eight) != grows


def test_residuals_are_copied_to_a_store_and_read_of_it_in_one_program():
    def bytes_of(policy):
        """Return the bytes that a microbatch's residuals of a layer take, and seconds of a step."""
        sizes, seconds = priced("scheduled", "lockstep_1f1b", remat_policy=[policy])
        stored = sizes.itemsize * sizes.tokens * sizes.residuals
        return [float(np.asarray(a).reshape(2, -1)[0, 0]) for a in (stored, seconds.products)]

    (less, sooner), (more, later) = bytes_of("minimal"), bytes_of("none")
    assert more > less
    # Eight microbatches of two layers: each copy is read and written, by F and by B.
    copies = 4 * (more - less) * 8 * 2 / machine_of("v5p:2x2x2", 1, Config()).hbm
    assert later - sooner == pytest.approx(copies)
