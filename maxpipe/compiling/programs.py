"""The separate programs of the MPMD engine, compiled and written as text."""

from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from maxpipe.builder import build_trainer
from maxpipe.compiling.report import size
from maxpipe.compiling.step import out_of_memory
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.training.mpmd_trainer import MpmdTrainer


def write_programs(config: Config, mesh: Mesh, directory: Path) -> Iterator[str]:
    """Writes every computation of a training step to `stage_S/NAME.txt` as sliced and `stage_S/NAME.hlo` as compiled.

    Args:
      config: resolved, for the MPMD engine, its stages chosen.
      mesh: of the devices to compile for.
      directory: made if it is not there.

    Yields:
      A line for each computation: its memory on a device of the stage.

    Raises:
      OSError: something cannot be written.
      OutOfMemory: the compiler says that the computation after the last line does not fit.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Of other stages or units, which this configuration may not have.
    for former in (*directory.glob("stage_*/*.txt"), *directory.glob("stage_*/*.hlo")):
        former.unlink()
    trainer = build_trainer(update(config, {"telemetry.batch_digest": False}), mesh)
    assert isinstance(trainer, MpmdTrainer)
    texts = trainer.engine.texts()
    try:
        for stage, name, compiled in trainer.engine.compile():
            folder = directory / f"stage_{stage}"
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.txt").write_text(texts[name], encoding="utf-8")
            (folder / f"{name}.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
            memory = compiled.memory_analysis()
            assert memory is not None
            yield (
                f"{f'stage {stage}':<12}{name!s:<5} arguments {size(memory.argument_size_in_bytes)}, "
                f"results {size(memory.output_size_in_bytes - memory.alias_size_in_bytes)}, "
                f"temp {size(memory.temp_size_in_bytes)}"
            )
    except jax.errors.JaxRuntimeError as error:
        raise (out_of_memory(str(error)) or error) from None
