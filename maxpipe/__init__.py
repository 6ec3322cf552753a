"""Train language models from YAML in JAX, built around pipeline parallelism.

On a command line, begin with `python -m maxpipe.train base`, and `maxpipe --help`. In Python:

    import maxpipe

    config = maxpipe.load_config("base", "steps=100")  # a path, or the name of a shipped file
    run = maxpipe.Run(config)                          # starts JAX, with its simulated devices
    run.train(callback=lambda step, metrics: print(step, metrics["loss"]))

    model = maxpipe.load_model(run.directory)
    model.logits([[1, 2, 3]])                          # [B, T] -> [B, T, V]
    model.generate("def ")

    maxpipe.history("runs/base")                       # the rows of its metrics.jsonl

    maxpipe.schedule("lockstep_1f1b", "zb_h1", stages=4, microbatches=8)  # draws itself

See `help(maxpipe.Run)` and the like, and docs/python.md. Importing maxpipe does not import JAX;
`Run` and `load_model` do.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maxpipe.api.configs import load_config
    from maxpipe.api.history import history
    from maxpipe.api.run import Diverged, Run
    from maxpipe.api.schedules import schedule
    from maxpipe.config.errors import ConfigError
    from maxpipe.generate.model import Model, load_model

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Diverged",
    "Model",
    "Run",
    "history",
    "load_config",
    "load_model",
    "schedule",
]

_MODULES = {
    "ConfigError": "maxpipe.config.errors",
    "Diverged": "maxpipe.api.run",
    "Model": "maxpipe.generate.model",
    "Run": "maxpipe.api.run",
    "history": "maxpipe.api.history",
    "load_config": "maxpipe.api.configs",
    "load_model": "maxpipe.generate.model",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name == "schedule":  # the command's module, which is callable
        return importlib.import_module("maxpipe.schedule")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'maxpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that a user should see."""
    return [*globals(), *__all__]
