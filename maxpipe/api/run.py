"""Train from Python: a run that does what `python -m maxpipe.train` does, in this process."""

from pathlib import Path
from typing import Any

import jax

from maxpipe.api.history import history
from maxpipe.builder import build_trainer
from maxpipe.checkpoint.steps import committed_steps
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.options import OPTIONS
from maxpipe.config.rules.run import check_trains
from maxpipe.config.sections import Config
from maxpipe.data.check import with_steps
from maxpipe.devices.mesh import num_slices
from maxpipe.devices.start import start_jax
from maxpipe.supervise.ending import INTERRUPTED, PREEMPTED, Interruption
from maxpipe.supervise.process import Supervision
from maxpipe.telemetry.recorder import METRICS
from maxpipe.training.loop import DIVERGED, DONE, OnStep, Session
from maxpipe.training.run_directory import RunDirectory
from maxpipe.training.start import launch, log


class Diverged(RuntimeError):
    """A run ended because its losses or gradients were not finite; its message says what to do."""


class Run:
    """A training run, with the same directory and files as with `python -m maxpipe.train`.

    Creating one starts JAX, with `mesh.simulated_devices` on a CPU. All runs of a process have the
    same devices, because JAX cannot change them.

    Args:
      config: the configuration, from `maxpipe.load_config`.

    Raises:
      ConfigError: a ValueError: the configuration does not fit the devices, or JAX has already
        started with devices other than those to simulate.
      TypeError: `config` is not a configuration but, for example, a file's name.

    Attributes:
      config: the configuration with all derived values filled in.
      directory: `output_dir`/`run_name`, an absolute path.
    """

    def __init__(self, config: Config):
        if not isinstance(config, Config):
            raise TypeError(f"maxpipe.Run takes a configuration: Run(load_config({config!r}))")
        check_trains(config)
        # Only messages of a command line need the sources of values.
        self._loaded = with_steps(Loaded(config, dict.fromkeys(OPTIONS, "")))
        start_jax(config)
        devices = jax.devices()
        self.config = resolve(self._loaded, len(devices), num_slices(devices))
        self.directory: Path = RunDirectory(config).root.absolute()
        self._current: Session | None = None
        self._step = 0
        self._state: Any = None

    def __repr__(self) -> str:
        return f"<maxpipe run in {self.directory}, {self.step} of {self.config.steps} steps done>"

    @property
    def step(self) -> int:
        """Return how many steps are finished, including earlier starts; 0 before `train`."""
        return self._current.step if self._current else self._step

    @property
    def state(self) -> Any:
        """Return the trainer's state after `step`, as it lies on the devices.

        It has `params`, `opt_state` and `step`, with layers grouped by stage; on the mpmd engine it
        holds the state of each stage. None before `train`, and if `train` found the run finished;
        `maxpipe.load_model(run.directory)` has the parameters in model order.
        """
        return self._current.state if self._current else self._state

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return `maxpipe.history` of the directory; no rows before the run's first start."""
        return history(self.directory) if (self.directory / METRICS).is_file() else []

    def train(self, callback: OnStep | None = None) -> None:
        """Train to the last step, or continue a run that has been stopped.

        In the main thread, Ctrl-C and SIGTERM end the run after its current step and a save, and
        then raise their usual exceptions.

        Args:
          callback: called as callback(step, metrics) after every step, counted from 1. The metrics
            are those of a row in `metrics.jsonl`, but may be non-finite; `state` is the state after
            the step. Every step is waited for, and an exception of the callback ends the run.

        Raises:
          ConfigError: a ValueError: the data or the directory do not fit the configuration.
          Diverged: too many steps in a row were not finite.
          KeyboardInterrupt, SystemExit: after Ctrl-C; after SIGTERM, with code 75.
        """

        begun = False

        def begin(current: Session) -> None:
            nonlocal begun
            self._current, begun = current, True
            current.on_step = callback

        try:
            with Interruption(ends_process=False) as interruption:
                supervision = Supervision(interruption, owns_process=False)  # and no deadline
                exit_code = launch(self._loaded, supervision, build_trainer, begin)
        finally:
            self._close()
        if exit_code == DONE and not begun:  # an earlier start has finished the run
            saved = committed_steps(RunDirectory(self.config).checkpoints)
            self._step = max([self.config.steps, *saved])
            log("nothing was trained and no callback called: another run_name, or more steps, does")
        if exit_code == DIVERGED:
            raise Diverged(
                f"the run in {self.directory} is not finite after step {self.step}; lower "
                "optimizer.learning_rate and start again"
            )
        if exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if exit_code == PREEMPTED:
            raise SystemExit(PREEMPTED)

    def _close(self) -> None:
        """Keep only state and step: loaders must be gone before the interpreter exits."""
        self._step, self._state = self.step, self.state
        self._current = None
