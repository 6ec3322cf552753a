"""How often the conditionals of a compiled step do their work."""

import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.compiling.analysis import branch_runs

MICROBATCHES = 4
TICKS = 9


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ({"pipeline.skip_idle": "false"}, MICROBATCHES),
        ({"pipeline.skip_idle": "true"}, TICKS),
        ({}, TICKS),  # auto skips idle slots on simulated devices ...
        ({"mesh.ici.tensor": 2}, MICROBATCHES),  # ... unless the partitioner splits their work
        ({"pipeline.schedule": "circular", "pipeline.engine": "circular"}, TICKS),
    ],
)
def test_branch_runs_of_ticks_counts_microbatches_where_idle_slots_are_computed(values, runs):
    config = tiny(
        **{
            "pipeline.engine": "scheduled",
            "pipeline.schedule": "lockstep_1f1b",
            "pipeline.num_repeats": 1,
            "pipeline.num_microbatches": MICROBATCHES,
            "mesh.ici.stage": 2,
        }
        | values
    )
    assert branch_runs(config, make_mesh(config))(TICKS) == runs
