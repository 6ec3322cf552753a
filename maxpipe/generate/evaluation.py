"""Run `python -m maxpipe.evaluate`: load a checkpoint, evaluate it on tasks, print the table."""

import argparse
import fnmatch
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from maxpipe.checkpoint.average import not_read
from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.steps import StepStore
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.outputs import write_file
from maxpipe.generate.lm_eval_model import ModelOfRun
from maxpipe.generate.model import Model

DONE, NOT_LOADED = 0, 1  # exit codes


def launch(flags: argparse.Namespace, store: StepStore, steps: list[int]) -> int:
    """Print lm-eval's table of a run, and return the exit code.

    Args:
      flags: command-line flags of `maxpipe.evaluate`.
      store, steps: the checkpoints to read, from `find_checkpoint`.

    Raises:
      ConfigError: the tokenizer or a task is not usable.
    """
    manager = TaskManager(include_path=flags.include)
    tasks = matching_tasks(flags.tasks, manager.all_tasks)
    try:
        model = Model(store, steps, flags.tokenizer)
        model.find_tokenizer()
        model.load()
    except (CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable) as error:
        print(not_read(store, steps, error), file=sys.stderr)
        return NOT_LOADED
    try:
        results = lm_eval.simple_evaluate(
            ModelOfRun(model, flags.batch_size),
            tasks=tasks,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            task_manager=manager,
            log_samples=False,
        )
    except ConfigError:
        raise
    except Exception as error:  # of lm-eval or a task: data, packages, templates, the hub
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(Problem("--tasks", f"cannot be evaluated: {reason}")) from error
    assert results is not None  # this is the only process
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    if flags.json:
        kept = {
            name: results[name]
            for name in ("results", "groups", "n-samples", "versions")
            if name in results
        }
        text = json.dumps(
            {"run": str(store), "step": model.step, **kept},
            indent=2,
            default=handle_non_serializable,
        )
        write_file("--json", flags.json, text + "\n")
    return DONE


def matching_tasks(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the tasks that match names or patterns; raise ConfigError if one matches none."""
    problems, tasks = [], dict[str, None]()
    for name in names:
        matches = fnmatch.filter(known, name)
        tasks.update(dict.fromkeys(matches))
        if not matches:
            near = get_close_matches(name, known, n=3)
            remedy = f"; did you mean {' or '.join(near)}?" if near else ""
            problems.append(Problem("--tasks", f"lm-eval has no task {name!r}{remedy}"))
    if problems:
        raise ConfigError(*problems)
    return [*tasks]
