"""Run the mpmd engine in several processes, and compare with the sequential engine in this one.

The processes start once for many configurations of as many devices. Each takes its stages through
loss, gradients and an evaluation; process 0 leaves what they joined in a file for each case.
"""

import dataclasses
import json
import pickle
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from helpers.engines import Result, assert_same, make_batch, mpmd_state, reference, result_of, tiny
from helpers.training_process import DEADLINE_SECONDS, ends, members
from maxpipe.builder import build_trainer
from maxpipe.config import Config
from maxpipe.devices.mesh import build_mesh
from maxpipe.devices.start import start_jax
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.mpmd_trainer import MpmdTrainer

Values = dict[str, Any]
PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from helpers.mpmd_processes import main
main(sys.argv[1], sys.argv[2:])
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What several processes computed together."""

    result: Result
    cross_entropy: float  # sums of the evaluation batch
    weight: float
    compiled: list[list[str]]  # the programs of units that each process compiled, by name


def run_cases(directory: Path, processes: int, cases: list[Values]) -> list[Outcome]:
    words = [str(directory), *map(json.dumps, cases)]
    with members(directory, processes, words, program=PROGRAM) as started:
        codes, output = ends(started, DEADLINE_SECONDS * (1 + len(cases)))
    assert codes == [0] * processes, output
    return [_read(directory, case, processes) for case in range(len(cases))]


def assert_equal_to_sequential(cases: list[Values], outcomes: list[Outcome]) -> None:
    """Assert that losses, all gradients and evaluations are those of one device."""
    for values, outcome in zip(cases, outcomes, strict=True):
        # An evaluation is of the same batch, and has no dropout.
        config = tiny(**values)
        rows = config.data.global_batch_size
        assert_same(outcome.result, reference(config.model, rows))
        weights = make_batch(rows)["weights"]
        assert outcome.weight == np.sum(weights, dtype=np.float64)
        mean = outcome.cross_entropy / outcome.weight
        if not config.model.dropout:
            assert abs(mean - outcome.result.loss) <= 1e-5 * mean


def main(directory: str, cases: list[str]) -> None:
    values = list(map(json.loads, cases))
    count = int(np.prod([*dataclasses.asdict(tiny(**values[0]).mesh.ici).values()]))
    start_jax(tiny(**values[0], **{"mesh.simulated_devices": count}))
    try:
        for case, of_case in enumerate(values):
            _run_case(Path(directory), case, tiny(**of_case))
    except BaseException:
        traceback.print_exc()
        raise


def _run_case(directory: Path, case: int, config: Config) -> None:
    mesh = build_mesh(config)
    trainer = build_trainer(config, mesh)
    assert isinstance(trainer, MpmdTrainer)
    state = mpmd_state(trainer, config)
    batch = make_batch(config.data.global_batch_size)
    placed = BatchPlacer(mesh, trainer.batch_spec, len(batch["tokens"]))
    local = {name: x[placed.rows] for name, x in batch.items()}
    metrics, gradients = trainer.engine.loss_and_gradients(
        state.params, placed(local), jax.random.key(0)
    )
    metrics = jax.device_get(trainer.engine.everywhere(metrics))
    evaluated = jax.device_get(trainer.forward(state, placed(local)))
    stages = [
        dataclasses.replace(stage, params=of_stage)
        for stage, of_stage in zip(state.stages, gradients, strict=True)
    ]
    on_disk = trainer.to_canonical(dataclasses.replace(state, stages=tuple(stages)))
    gradients = jax.tree.map(_whole, on_disk.params)
    programs: dict[UnitName, Any] = dict(trainer.engine.training.runner.executables)
    # A jitted function has one cached program for each layout of its arguments.
    compiled = [str(name) for name, unit in programs.items() if unit.run._cache_size()]
    file = directory / f"case{case}-{jax.process_index()}.pickle"
    file.write_bytes(pickle.dumps((metrics, gradients, evaluated, compiled)))


def _whole(leaf: jax.Array) -> np.ndarray:
    """Return an array of all processes as a whole, in every one."""
    if leaf.is_fully_replicated:
        return np.asarray(leaf)
    whole: np.ndarray = multihost_utils.process_allgather(leaf, tiled=True)
    return whole


def _read(directory: Path, case: int, processes: int) -> Outcome:
    by_process = [
        pickle.loads((directory / f"case{case}-{index}.pickle").read_bytes())
        for index in range(processes)
    ]
    metrics, gradients, evaluated, _ = by_process[0]
    for others in by_process[1:]:
        assert others[0]["loss"] == metrics["loss"], "every process knows the same loss"
        assert others[2] == evaluated
    return Outcome(
        result_of(metrics, gradients),
        float(evaluated["cross_entropy"]),
        float(evaluated["weight"]),
        [compiled for *_, compiled in by_process],
    )
