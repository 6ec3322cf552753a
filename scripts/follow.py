"""List the files that a key or a batch passes through: `python scripts/follow.py WAY`.

repeats   every file of the package that `pipeline.num_repeats` passes on its way from the command
          line into the compiled step: every file in which a function takes the word, the key or
          its setting, in which the value or a number computed from it is used, or in which a
          function takes the table, the plan or the layout that is made from it
executed  every file of the package in which any function runs between the conversion of that key
          and the traced step, whether it has to do with the key or not
batch     every file of the package in which a function runs from the request for a batch to its
          loss, on the sequential engine, the compiled program included
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "maxpipe"
KEY = "pipeline.num_repeats"
REPEATS = (
    "mesh.simulated_devices=4",
    "mesh.ici.stage=2",
    "mesh.ici.fsdp=2",
    "pipeline.num_repeats=2",
    "pipeline.num_microbatches=4",
    "pipeline.schedule=lockstep_1f1b",
)
BATCH = ("pipeline.engine=sequential", "mesh.ici.stage=1", "mesh.ici.fsdp=1", "eval.every=1")
SMALL = (
    "model.num_layers=4",
    "model.embed_dim=32",
    "model.mlp_dim=64",
    "model.num_query_heads=2",
    "model.num_kv_heads=2",
    "data.sequence_length=32",
    "data.global_batch_size=8",
    "compile.cache_dir=off",
)


class Files:
    """The files of the package that were passed, in the order of their first use."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add(self, frame: FrameType | None) -> None:
        """Add the file that a frame runs in, if it is one of the package."""
        if frame is not None and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            self.names.setdefault(str(Path(frame.f_code.co_filename).relative_to(PACKAGE.parent)))


def traced_int(files: Files) -> type[int]:
    """Return a type of whole numbers that note the file in which they are used."""

    class Traced(int):
        pass

    def noting(name: str) -> Callable[..., Any]:
        plain = getattr(int, name)

        def operate(self: int, *arguments: Any) -> Any:
            files.add(sys._getframe(1))
            result = plain(self, *arguments)
            return Traced(result) if type(result) is int else result

        return operate

    arithmetic = "add sub mul floordiv mod divmod neg radd rsub rmul rfloordiv rmod"
    for word in f"{arithmetic} eq lt le gt ge index bool int str repr format truediv".split():
        if hasattr(int, f"__{word}__"):
            setattr(Traced, f"__{word}__", noting(f"__{word}__"))
    Traced.__hash__ = int.__hash__  # type: ignore[method-assign]
    return Traced


def follow_repeats() -> tuple[list[str], list[str]]:
    """Follow `pipeline.num_repeats` from the command line into the traced step.

    Returns:
      Files that the value passes, and files in which any function runs after its conversion.
    """
    import jax

    from maxpipe.builder import build_trainer
    from maxpipe.config.cli import parse_args
    from maxpipe.config.files import Setting
    from maxpipe.config.options import Option
    from maxpipe.devices.mesh import build_mesh
    from maxpipe.pipeline.engines.scheduled.tick_plan import LockstepPlan
    from maxpipe.pipeline.layout import StageLayout
    from maxpipe.pipeline.schedules.table import Table

    loading = importlib.import_module("maxpipe.config.load")
    files, executed = Files(), Files()
    traced = traced_int(files)
    convert = loading.convert
    is_converted = False

    def convert_traced(option: Option, raw: Any) -> Any:
        nonlocal is_converted
        value = convert(option, raw)
        is_converted |= option.key == KEY
        return traced(value) if option.key == KEY else value

    def carries(value: object) -> bool:
        if isinstance(value, list):
            return any(type(item) is str and item == f"{KEY}=2" for item in value)
        if isinstance(value, str):
            return value in (KEY, f"{KEY}=2")
        if isinstance(value, Option | Setting):
            return value.key == KEY
        return isinstance(value, Table | LockstepPlan | StageLayout)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            return
        # The body of a module or a class is no function: it runs because of an import.
        if is_converted and frame.f_code.co_flags & CO_OPTIMIZED:
            executed.add(frame)
        if any(carries(value) for value in frame.f_locals.values()):
            files.add(frame)

    loading.convert = convert_traced
    sys.setprofile(note)
    try:
        arguments = parse_args([BASE, *SMALL, *REPEATS], prog="follow", description="")
        config = loading.resolve(arguments.loaded, 4)
        trainer = build_trainer(config, build_mesh(config, jax.devices()[:4]))
        trace_step(trainer, config)
    finally:
        sys.setprofile(None)
        loading.convert = convert
    return [*files.names], [*executed.names]


def trace_step(trainer: Any, config: Any) -> None:
    """Trace the train step for abstract arguments; nothing is compiled."""
    import jax
    import jax.numpy as jnp

    shape = config.data.global_batch_size, config.data.sequence_length
    integers = jax.ShapeDtypeStruct(shape, jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), integers)
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    trainer.jitted_step.trace(trainer.abstract_state(), batch)


@contextmanager
def profiled(files: Files) -> Iterator[Callable[[], None]]:
    """Add the file of every function that runs from the call of what is yielded to the end.

    Threads that are started inside are followed from their start, since they read ahead.
    """
    import threading

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame)

    def begin() -> None:
        sys.setprofile(note)

    threading.setprofile(note)
    try:
        yield begin
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def follow_batch() -> list[str]:
    """Return the files in which a function runs from the question for a batch to its loss."""
    import jax

    from maxpipe.builder import build_trainer
    from maxpipe.config.load import load, resolve
    from maxpipe.data.loader import make_loader
    from maxpipe.devices.mesh import build_mesh
    from maxpipe.training.batches import BatchPlacer

    config = resolve(load(BASE, [*SMALL, *BATCH]), 1)
    mesh = build_mesh(config, jax.devices()[:1])
    trainer = build_trainer(config, mesh)
    state = trainer.init(jax.random.key(0))
    place = BatchPlacer(mesh, trainer.batch_spec, config.data.global_batch_size)
    files = Files()
    with profiled(files) as begin:
        loader = make_loader(config, "train", place.rows)
        begin()
        sums = trainer.forward(state, place(next(loader)))
        assert float(sums["weight"]) > 0
    loader.close()
    return [*files.names]


BASE = str(PACKAGE.parent / "configs" / "base.yml")
WAYS = ("repeats", "executed", "batch")


def main() -> int:
    """Print the files of the way that the first word names."""
    words = sys.argv[1:]
    if len(words) != 1 or words[0] not in WAYS:
        print(__doc__, file=sys.stderr)
        return 2
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    if words == ["batch"]:
        print(*follow_batch(), sep="\n")
        return 0
    passed, executed = follow_repeats()
    print(*(passed if words == ["repeats"] else executed), sep="\n")
    summary = f"the value passes {len(passed)} files; functions run in {len(executed)}"
    print(summary, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
