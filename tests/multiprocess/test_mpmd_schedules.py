"""Every kind of schedule of the mpmd engine in several processes equals the sequential engine.

One start of the processes runs all cases of as many devices.
"""

import pytest
from helpers.engines import tiny
from helpers.mpmd_processes import assert_equal_to_sequential, run_cases

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table

NAMES = ("1f1b", "interleaved_1f1b", "zb_h2", "zb_v", "v_half", "dualpipe_v")
# With more units of a step than the 32 programs that XLA takes before it blocks a launch.
MICROBATCHES = 21
# The load of all experts is known on the last stage, and moves biases on each.
EXPERTS = {
    "model.moe.experts": 6,
    "model.moe.per_token": 2,
    "model.moe.mlp_dim": 16,
    "model.moe.balance_loss": 0.3,
    "model.moe.bias_rate": 0.5,
}


def case_of(name, stages, fsdp, **values):
    return {
        "pipeline.engine": "mpmd",
        "pipeline.schedule": name,
        "pipeline.num_repeats": SCHEDULES[name].repeats_for(2),
        "pipeline.num_microbatches": MICROBATCHES,
        "pipeline.remat_policy": "minimal",
        "model.num_layers": 2 * stages,
        "data.global_batch_size": 4 * MICROBATCHES,
        "mesh.ici.stage": stages,
        "mesh.ici.fsdp": fsdp,
    } | values


def from_csv(directory, stages, fsdp):
    table = build_table(tiny(**case_of("zb_h1", stages, fsdp)))
    file = directory / "table.csv"
    file.write_text(to_csv(table))
    return case_of("zb_h1", stages, fsdp, **{"pipeline.schedule": str(file)})


def uneven(stages, fsdp):
    sizes = [2] * (stages - 1) + [3]
    layers = {"pipeline.layers_per_stage": sizes, "model.num_layers": sum(sizes)}
    return case_of("1f1b", stages, fsdp, **layers, **{"model.tie_embeddings": True})


def tied_and_uneven_v(stages, fsdp):
    sizes = [1] * (2 * stages - 1) + [2]
    layers = {"pipeline.layers_per_stage": sizes, "model.num_layers": sum(sizes)}
    other = {"model.tie_embeddings": True, "model.dropout": 0.2}
    return case_of("zb_v", stages, fsdp, **layers, **other)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("processes", "stages", "fsdp"),
    [
        (2, 2, 2),
        (2, 4, 1),  # two stages in each process
        (4, 2, 2),  # two processes for each stage
        (4, 4, 2),
    ],
)
def test_schedules_in_processes_equal_sequential(tmp_path, processes, stages, fsdp):
    cases = [
        *(case_of(name, stages, fsdp) for name in NAMES),
        from_csv(tmp_path, stages, fsdp),
        uneven(stages, fsdp),
        tied_and_uneven_v(stages, fsdp),
    ]
    assert_equal_to_sequential(cases, run_cases(tmp_path, processes, cases))


@pytest.mark.slow
def test_rows_over_two_axes_in_processes_equal_sequential(tmp_path):
    # With `data` before `stage` in the mesh, neighbouring devices are of different stages.
    data = {"mesh.ici.data": 2, "model.tie_embeddings": True}
    cases = [
        case_of("zb_v", 2, 1, **data),
        case_of("interleaved_1f1b", 2, 1, **data, **{"pipeline.fsdp_gather": "once"}),
        case_of("1f1b", 2, 1, **{"mesh.ici.tensor": 2}),
        case_of("1f1b", 2, 2, **{"pipeline.fsdp_gather": "once"}),
        case_of("zb_h1", 2, 2, **EXPERTS),
        uneven(2, 2),
    ]
    assert_equal_to_sequential(cases, run_cases(tmp_path, 2, cases))
