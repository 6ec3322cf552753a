"""Change the batch size and the weights of a mixture between two steps of a run.

The steps between two changes are a phase. Where one begins, the loader is opened anew at the
position after the last batch, without what it has prefetched; another batch size has a trainer of
its own. What is due follows from the step alone, so a run that is resumed enters the same phase.
"""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.options import update
from maxpipe.config.rules.layout import smaller_microbatches
from maxpipe.config.sections import Config
from maxpipe.config.terminal import ignore_note
from maxpipe.data.documents import describe_shares
from maxpipe.data.loader import check_state, initial_state, make_loader
from maxpipe.data.rows import Era
from maxpipe.devices.chips import chip_for, devices_per_chip
from maxpipe.plan.flops import model_flops_per_token
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.loop import Session, data_position
from maxpipe.training.trainer import BuildTrainer

ERAS = "mixture_eras"  # in a checkpoint's meta, if the weights of the mixture have changed


def begin_phase(
    mesh: Mesh, build_trainer: BuildTrainer, run: Session, position: np.ndarray | None = None
) -> None:
    """Go on with the batch size and the weights that are due after `run.step`; in all processes.

    The live state stays where it is: its layout does not depend on the batch.

    Args:
      position: data position of a checkpoint, int64 [rows, 3]; by default that of the loader.

    Raises:
      ConfigError: the rows of the checkpoint cannot be dealt to the batch.
    """
    config, num_documents = config_after(run.config, run.step), run.loader.num_documents
    size = config.data.global_batch_size
    if position is None:
        position = data_position(run)
        run.recorder.print_line(f"step {run.step}: {describe_phase(config, run.step)} from here on")
    # 1. What is next in the data.
    eras = _eras(run, position)
    if len(position) != size:
        check_state(position, range(len(position)), num_documents, len(position))
        if size % len(position):
            problem = f"has {size} sequences after step {run.step}, where the checkpoint has"
            remedy = f"{len(position)}: give a multiple of these"
            raise ConfigError(Problem("data.batch_ramp", f"{problem} {remedy}"))
        earlier = config_after(run.config, run.step - 1).data.global_batch_size
        if earlier != len(position):
            problem = f"has {earlier} sequences before step {run.step}, up to which the run has"
            remedy = f"{len(position)}: write [{run.step}, {size}]"
            raise ConfigError(Problem("data.batch_ramp", f"{problem} {remedy}"))
        position = dealt(position, size, num_documents)
    # 2. The step.
    if size != run.place.num_rows:
        run.trainer = build_trainer(config, mesh, note=ignore_note)
        run.place = BatchPlacer(mesh, run.trainer.batch_spec, size)
        tokens = size * config.data.sequence_length
        run.recorder.new_batch(run.step, tokens, peak_seconds(config, mesh))
    # 3. The loader; skipped documents are named once, and counted at the end.
    skipped, run.loader.skipped = run.loader.skipped, set()
    run.loader.close()
    run.loader = make_loader(config, "train", run.place.rows, position[run.place.rows], eras)
    run.loader.skipped = skipped


def config_after(c: Config, step: int) -> Config:
    """Return the configuration of the batch that follows `step` finished steps."""
    sizes = [size for start, size in c.data.batch_ramp if start <= step]
    if not sizes or sizes[-1] == c.data.global_batch_size:
        return c
    count = smaller_microbatches(c, sizes[-1])
    return update(c, {"data.global_batch_size": sizes[-1], "pipeline.num_microbatches": count})


def first_position(config: Config, num_documents: int) -> np.ndarray:
    """Return the data position before the first step, int64 [rows, 3]."""
    return initial_state(range(config_after(config, 0).data.global_batch_size), num_documents)


def dealt(position: np.ndarray, num_rows: int, num_documents: int) -> np.ndarray:
    """Return the data position, int64 [num_rows, 3], with which a multiple of the rows goes on.

    Row r of B becomes rows r, r + B, ...: they share its documents, and one of them goes on within
    the document that it has begun. So no document is left out or read twice.
    """
    rows = np.arange(num_rows)
    epoch, place, offset = position[rows % len(position)].T
    draw = epoch * num_documents + place
    own = draw + (rows - draw) % num_rows
    epoch, place = np.divmod(own, num_documents)
    return np.stack([epoch, place, np.where(own == draw, offset, 0)], axis=1)


def first_unread(position: np.ndarray, num_documents: int, eras: Sequence[Era]) -> np.ndarray:
    """Return the first draw that each row of a data position has not begun, int64 [rows]."""
    epoch, place, offset = position.T
    draw = epoch * num_documents + place + np.where(offset > 0, len(position), 0)
    first = eras[-1].first_draw if eras else 0
    return np.maximum(draw, first + (draw - first) % len(position))


def describe_phase(config: Config, step: int) -> str:
    """Return the batch size of a configuration and its sources after a step, in words."""
    sequences = f"{config.data.global_batch_size} sequences a step"
    return f"{sequences} of {describe_shares(config.data, step) or config.data.source}"


def peak_seconds(config: Config, mesh: Mesh) -> float | None:
    """Return the seconds of a step at the chips' peak FLOP/s; None if the chip is unknown."""
    devices = mesh.devices.reshape(-1).tolist()
    chip = chip_for(devices[0].device_kind)
    if chip is None:
        return None  # and no layer has to be traced
    length = config.data.sequence_length
    flops = config.data.global_batch_size * length * model_flops_per_token(config.model, length)
    num_chips = mesh.size / devices_per_chip(devices)
    return flops / (chip.peak_flops[config.model.dtype] * num_chips)


def _eras(run: Session, position: np.ndarray) -> list[Era]:
    """Return the eras of the mixture, a new one if other weights are due, and record them."""
    data = run.config.data
    due, eras = data.weights_after(run.step), [Era(*era) for era in run.meta.get(ERAS, [])]
    # With checkpoint.accept_changes a run may have got other sources, and begins anew with them.
    eras = [era for era in eras if len(era.weights) == len(due)]
    if due != (eras[-1].weights if eras else data.weights_after(0)):
        eras.append(Era(due, first_unread(position, run.loader.num_documents, eras).tolist()))
    if eras:
        run.meta[ERAS] = eras
    return eras
