"""`python -m maxpipe.train CONFIG.yml key=value ...`: trains a model, or goes on where the run left off."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxpipe.config.cli import exit_on_config_error, parse_args
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.printing import notes
from maxpipe.config.sections import Config

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from maxpipe.training.loop import Run


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0 done, 2 configuration error, 42 diverged."""
    arguments = parse_args(
        argv, prog="python -m maxpipe.train", description="Train a language model from one YAML file."
    )
    # A wrong configuration must not wait for these imports.
    from maxpipe.mesh import build_mesh, num_slices, start_jax

    start_jax(arguments.loaded.config)
    import jax

    devices = jax.devices()
    config = resolve(arguments.loaded, len(devices), num_slices(devices))
    return run(config, arguments.loaded, build_mesh(config))


def run(config: Config, loaded: Loaded, mesh: "Mesh") -> int:
    """Trains a resolved configuration on a mesh; returns the exit code."""
    import jax

    from maxpipe.builder import build_run, open_run_directory
    from maxpipe.training.loop import DONE, closing, train
    from maxpipe.training.report import report

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    directory, checkpointer = open_run_directory(config, say)
    if max(checkpointer.steps(), default=0) >= config.steps and config.checkpoint.resume in ("auto", "must"):
        say(f"{directory.root} is finished: it holds step {max(checkpointer.steps())} of steps={config.steps}; nothing to do")
        return DONE
    decisions: list[str] = []
    started = time.perf_counter()
    current = build_run(config, mesh, directory, checkpointer, decisions.append)
    for line in report(config, mesh, str(directory.root), current.step, [*notes(config, loaded), *decisions]):
        say(line)
    code = closing(current, lambda: train(current))
    if code == DONE:
        say(_farewell(current, str(directory.root), time.perf_counter() - started))
    return code


def _farewell(current: "Run", root: str, seconds: float) -> str:
    steps = current.config.steps
    if current.step < steps:
        return f"stopped after step {current.step} of {steps}, as stop_after says; the same command without it goes on"
    return f"done: {steps} steps in {root}, {seconds:.0f} s for this start; `tensorboard --logdir {root}` shows its curves"


if __name__ == "__main__":
    sys.exit(main())
