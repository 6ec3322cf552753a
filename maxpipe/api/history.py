"""Read what a run has recorded. Imports no JAX."""

from os import PathLike, fspath
from pathlib import Path
from typing import Any

from maxpipe.comparison.recorded import metrics_rows
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.telemetry.recorder import METRICS


def history(run_dir: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl` so far, those of earlier starts included.

    Rows of steps have `loss`, those of evaluations `eval_loss`; all have `step`. A run may be live.

    Args:
      run_dir: `output_dir`/`run_name`.

    Raises:
      ConfigError: a ValueError: the directory has no such file.
    """
    file = Path(fspath(run_dir), METRICS)
    if not file.is_file():
        message = f"there is no {file}; runs lie in output_dir/run_name"
        raise ConfigError(Problem("run_dir", message))
    return [row for _, row in metrics_rows(file)]
