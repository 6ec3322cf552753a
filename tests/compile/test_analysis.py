"""What a step is compared with, and how often its conditionals do their work."""

from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_trainer
from maxpipe.compile import analysis, report
from maxpipe.compile.analysis import analyse, branch_runs
from maxpipe.compile.step import OutOfMemory

MICROBATCHES = 4
TICKS = 9


def test_branch_runs_of_ticks_counts_microbatches_where_idle_slots_are_computed():
    lockstep = {"pipeline.engine": "scheduled", "pipeline.schedule": "lockstep_1f1b"}
    lockstep |= {"pipeline.num_microbatches": MICROBATCHES, "mesh.ici.stage": 2}
    lockstep["pipeline.num_repeats"] = 1
    for values, runs in (
        ({"pipeline.skip_idle": "false"}, MICROBATCHES),
        ({"pipeline.skip_idle": "true"}, TICKS),
        ({}, TICKS),  # auto skips idle slots on simulated devices ...
        ({"mesh.ici.tensor": 2}, MICROBATCHES),  # ... unless the partitioner splits their work
        ({"pipeline.schedule": "circular", "pipeline.engine": "circular"}, TICKS),
    ):
        config = tiny(**lockstep | values)
        assert branch_runs(config, make_mesh(config))(TICKS) == runs, values


def test_a_step_that_the_compiler_gives_up_is_compared_with_the_memory_in_the_table(monkeypatch):
    def give_up(*_):
        raise OutOfMemory(needed=3e9, available=2e9)

    config = tiny(**{"pipeline.engine": "sequential", "mesh.simulated_devices": 1})
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)

    def capacity(in_table):
        monkeypatch.setattr(report, "device_memory", lambda devices: in_table)
        compiled, _ = analyse(config, config, mesh, trainer, note=print)
        return compiled.capacity, compiled.fits

    assert capacity(1e9) == (1e9, True)
    monkeypatch.setattr(analysis, "compile_step", give_up)
    assert capacity(1e9) == (1e9, False)
    assert capacity(None) == (2e9, False)
