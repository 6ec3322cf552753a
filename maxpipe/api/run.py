"""Train in a program: a run that does what `python -m maxpipe.train` does, without the process."""

from pathlib import Path
from typing import Any

import jax

from maxpipe.builder import build_trainer
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.options import OPTIONS
from maxpipe.config.rules.run import check_trains
from maxpipe.config.sections import Config
from maxpipe.devices.mesh import num_slices
from maxpipe.devices.start import start_jax
from maxpipe.supervision import supervise_in_program
from maxpipe.supervision.signals import INTERRUPTED, PREEMPTED
from maxpipe.training.launch import launch
from maxpipe.training.loop import DIVERGED, OnStep
from maxpipe.training.loop import Run as LoopRun
from maxpipe.training.run_directory import RunDirectory


class Diverged(RuntimeError):
    """A run ended because its losses or gradients were not finite; its message says what to do."""


class Run:
    """A run of training, in the directory and with the files of `python -m maxpipe.train`.

    Making one starts JAX, with `mesh.simulated_devices` on a CPU. All runs of a process have the
    same devices, because JAX cannot change them.

    Args:
      config: from `maxpipe.load_config`.

    Raises:
      ConfigError: a ValueError: the configuration does not fit the devices, or JAX has started
        with other ones than those to simulate.
      TypeError: `config` is no configuration, such as a file's name.

    Attributes:
      config: the configuration with every value that is derived.
      directory: `output_dir`/`run_name`, an absolute path.
    """

    def __init__(self, config: Config):
        if not isinstance(config, Config):
            raise TypeError(f"maxpipe.Run takes a configuration: Run(load_config({config!r}))")
        check_trains(config)
        # Sources of values are for the messages of a command line.
        self._loaded = Loaded(config, dict.fromkeys(OPTIONS, ""))
        start_jax(config)
        devices = jax.devices()
        self.config = resolve(self._loaded, len(devices), num_slices(devices))
        self.directory: Path = RunDirectory(config).root.absolute()
        self._current: LoopRun | None = None
        self._step = 0
        self._state: Any = None

    def __repr__(self) -> str:
        return f"<maxpipe run in {self.directory}, {self.step} of {self.config.steps} steps done>"

    @property
    def step(self) -> int:
        """Return how many steps are finished, also by earlier starts; 0 before `train`."""
        return self._current.step if self._current else self._step

    @property
    def state(self) -> Any:
        """Return the trainer's state after `step`, in its layout on the devices.

        It has `params`, `opt_state` and `step`, with layers by stage, or is that of every stage on
        the mpmd engine. None before `train`, and where that found the run finished already;
        `maxpipe.load_model(run.directory)` has the parameters in the order of the model.
        """
        return self._current.state if self._current else self._state

    def train(self, callback: OnStep | None = None) -> None:
        """Train to the last step, or continue a run that has been stopped.

        Ctrl-C and SIGTERM, in the main thread, end the run after its current step and a save, and
        then raise what they always raise.

        Args:
          callback: called as callback(step, metrics) after every step, counted from 1. The metrics
            are those of a row in `metrics.jsonl`, where numbers may be not finite; `state` is the
            one after the step. Every step is waited for, and what the callback raises ends the run.

        Raises:
          ConfigError: a ValueError: data or directory do not fit the configuration.
          Diverged: too many steps in a row were not finite.
          KeyboardInterrupt, SystemExit: after Ctrl-C; after SIGTERM, with code 75.
        """

        def begin(current: LoopRun) -> None:
            self._current = current
            current.on_step = callback

        try:
            with supervise_in_program() as supervision:
                exit_code = launch(self._loaded, supervision, build_trainer, begin)
        finally:
            self._close()
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
        """Keep state and step alone: loaders want to be gone before the interpreter ends."""
        self._step, self._state = self.step, self.state
        self._current = None
