"""`python -m maxpipe.train CONFIG.yml key=value ...`: trains a model, or goes on where the run left off.

Exit codes: 0 done; 1 failed; 2 configuration error; 42 diverged; 75 stopped by SIGTERM and 130 by
Ctrl-C, saved; 124 hung; 134 another process was lost. After 75, 124 and 134 the same command goes
on where the run left off.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxpipe.config.cli import exit_on_config_error, parse_args
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.printing import notes
from maxpipe.config.sections import Config
from maxpipe.devices.xla_flags import advice

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from maxpipe.supervision.supervise import Supervision
    from maxpipe.training.loop import Run


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = parse_args(
        argv,
        prog="python -m maxpipe.train",
        description="Train a language model from one YAML file.",
    )
    if arguments.loaded.config.compile.save:
        remedy = "give it to python -m maxpipe.compile, and compile.load=FILE here"
        raise ConfigError(Problem("compile.save", f"training stores no executable; {remedy}"))
    # A wrong configuration must not wait for these imports.
    from maxpipe.supervision.supervise import supervise

    with supervise(arguments.loaded.config.telemetry) as supervision:
        from maxpipe.devices.mesh import build_mesh, num_slices
        from maxpipe.devices.start import start_jax

        start_jax(arguments.loaded.config)
        import jax

        from maxpipe.supervision.failure import failing_fast

        with failing_fast():
            devices = jax.devices()
            config = resolve(arguments.loaded, len(devices), num_slices(devices))
            return run(config, arguments.loaded, build_mesh(config), supervision)


def run(
    config: Config, loaded: Loaded, mesh: "Mesh", supervision: "Supervision | None" = None
) -> int:
    """Trains a resolved configuration on a mesh; returns the exit code."""
    import jax

    from maxpipe.builder import build_run, open_run_directory
    from maxpipe.devices.chips import device_memory
    from maxpipe.devices.simulated import explain_threads
    from maxpipe.planning.auto_stages import choose_stages
    from maxpipe.training.loop import DONE, closing, train
    from maxpipe.training.start_report import report

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    device = mesh.devices.flat[0]
    decisions = [*advice(device.platform, os.environ), *explain_threads(config)]
    config = choose_stages(
        config, device_memory(mesh.devices.reshape(-1).tolist()), decisions.append
    )
    directory, checkpointer = open_run_directory(config, say)
    newest = max(checkpointer.steps(), default=0)
    if newest >= config.steps and config.checkpoint.resume in ("auto", "must"):
        checkpointer.close()  # the mirror may lack what an earlier process could not copy
        say(
            f"{directory.root} is finished: step {newest} of steps={config.steps} is saved; nothing to do"
        )
        return DONE
    started = time.perf_counter()
    current = build_run(config, mesh, directory, checkpointer, decisions.append, supervision)
    for line in report(
        config, mesh, str(directory.root), current.step, [*notes(config, loaded), *decisions]
    ):
        say(line)
    code = closing(current, lambda: train(current))
    say(_farewell(current, code, str(directory.root), time.perf_counter() - started))
    return code


def _farewell(current: "Run", code: int, root: str, seconds: float) -> str:
    step, steps = current.step, current.config.steps
    saved = max(current.checkpointer.steps(), default=None)
    kept = "nothing is saved" if saved is None else f"step {saved} is saved"
    if code:
        return f"stopped after step {step} of {steps}, {kept} in {root}; exit code {code}"
    if step < steps:
        return f"stopped after step {step} of {steps} (stop_after); the same command without it goes on"
    curves = f"`tensorboard --logdir {root}` shows its curves"
    return f"done: {steps} steps in {root}, {seconds:.0f} s for this start; {curves}"


if __name__ == "__main__":
    faulthandler.enable()  # shows what Python was doing when JAX aborts because another process was lost
    sys.exit(main())
