"""Predict a step of the mpmd engine from the timelines of its units' programs."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from maxpipe.compile.prediction.predict import prediction_of
from maxpipe.compile.prediction.prediction import Basis, Prediction
from maxpipe.compile.prediction.walk import Timeline
from maxpipe.compile.programs import UPDATE
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.schedules.table import KINDS, Table
from maxpipe.plan.simulate import COST_FIELDS, Costs, simulate


def predict_stages(
    table: Table,
    timelines: Mapping[UnitName, Timeline],
    basis: Basis,
    communication: float,
) -> Prediction:
    """Compose the units' times in the order of the schedule.

    What a stage runs once a step, to gather weights and to reduce gradients, is added to its own
    time alone. All stages update their parameters when the last one has its gradients, since they
    need the norm of all. The start of the step is not included. Parts, guessed seconds and bubble
    are means of all stages.

    Args:
      communication: seconds to send a unit's result to a neighbouring stage.
    """
    run = simulate(table, unit_costs(table, timelines, communication))
    once, updates = np.zeros(table.num_stages), np.zeros(table.num_stages)
    mean = Timeline()  # of what all stages run, each operation as often as a stage on average
    for name, timeline in timelines.items():
        if name.kind not in KINDS:
            of_stages = updates if name.kind == UPDATE else once
            of_stages[table.stage_of_chunk[name.chunk]] += timeline.seconds
        runs = name.runs(table.num_microbatches) / table.num_stages
        mean.unknown_loops += timeline.unknown_loops
        mean.spent += [
            each._replace(place=each.place._replace(runs=runs * each.place.runs))
            for each in timeline.spent
        ]
    work = run.work + once + updates
    makespan = float((run.last_end + once).max() + updates.max())
    predicted = prediction_of(mean, basis)
    return replace(
        predicted,
        seconds=None if predicted.unknown else makespan,
        bubble=makespan - float(work.mean()),
        has_bubble_in_parts=False,
    )


def unit_costs(table: Table, timelines: Mapping[UnitName, Timeline], communication: float) -> Costs:
    """Return the times of units by global chunk; the head is part of the last chunk's units."""

    def seconds(kind: str) -> list[float]:
        names = [UnitName(kind, chunk) for chunk in range(table.num_chunks)]
        if kind == "B" and names[0] not in timelines:
            # In a table with split backwards, a B that is not split is an I and a W.
            return np.add(seconds("I"), seconds("W")).tolist()
        return [timelines[name].seconds if name in timelines else 0.0 for name in names]

    return Costs(
        forward=seconds("F"),
        backward=seconds("B"),
        input_gradient=seconds("I"),
        weight_gradient=seconds("W"),
        communication=communication,
    )


def stage_words(table: Table, costs: Costs) -> str:
    """Return the times of whole stages as `maxpipe.schedule` takes them."""
    words = []
    for kind in table.kinds:
        of_chunks = costs.of_chunks(kind, table)
        stages = np.bincount(table.stage_of_chunk, of_chunks, table.num_stages)
        words.append(f"{COST_FIELDS[kind]}={','.join(f'{time:.4g}' for time in stages)}")
    return " ".join([*words, f"comm={costs.communication:.4g}"])
