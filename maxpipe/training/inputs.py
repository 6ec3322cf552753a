"""Open what a run reads before its first step: tokenizer, documents and initial weights.

They are opened one after the other, each where it is needed. Where one of them, or the directory of
the run, is refused, the others are opened as well, so that a user learns of all problems at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from maxpipe.checkpoint.policies import step_to_resume
from maxpipe.checkpoint.steps import committed_steps
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.data.documents import Split
from maxpipe.data.loader import open_tokenizer
from maxpipe.training.initial_weights import open_weights
from maxpipe.training.run_directory import RunDirectory


@contextmanager
def naming_all_inputs(config: Config) -> Iterator[None]:
    """Add to a ConfigError what is wrong with the inputs of a run, which are opened only then.

    Args:
      config: resolved.

    Raises:
      ConfigError: what is raised inside, with the problems of all inputs; each problem once.
    """
    try:
        yield
    except ConfigError as error:
        problems = dict.fromkeys([*error.problems, *input_problems(config)])
        raise ConfigError(*problems) from error


def input_problems(config: Config) -> list[Problem]:
    """Return what is wrong with tokenizer, documents, and the checkpoint or weights to begin with.

    The latter two are left out if there is a mirror, which may have checkpoints.
    """
    # grain takes longer to import than reporting an error of the configuration should.
    from maxpipe.data.mixture import open_mixture

    splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
    parts: list[Callable[[], object]] = [
        partial(open_tokenizer, config),
        *(partial(open_mixture, config.data, split, config.seed) for split in splits),
    ]
    if not config.checkpoint.mirror:
        parts.append(partial(_open_beginning, config))
    problems: list[Problem] = []
    for part in parts:
        try:
            part()
        except ConfigError as error:
            problems += error.problems
    return problems


def _open_beginning(config: Config) -> None:
    """Open the initial weights of a run that has no checkpoint to continue from."""
    directory = RunDirectory(config).checkpoints.absolute()  # as a checkpointer names it
    if step_to_resume(config.checkpoint.resume, committed_steps(directory), str(directory)) is None:
        open_weights(config)
