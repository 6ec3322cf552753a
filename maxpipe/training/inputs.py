"""Check what a run reads before its first step: tokenizer, documents and initial weights.

They are opened one after the other, each where it is needed. A run of one process checks beforehand
whatever needs no JAX, which takes seconds to import, so that a user learns of all problems at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from maxpipe.checkpoint.resume import AUTO, NEWEST, step_since, step_to_resume
from maxpipe.checkpoint.run_argument import find_step, open_steps
from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import read_shape
from maxpipe.config.load import Loaded, derive_known, simulated_mesh_problems
from maxpipe.config.model_places import MAXTEXT, RUN, maxtext_directory, run_of, split_scheme
from maxpipe.config.sections import Config
from maxpipe.data.documents import Split, open_sources
from maxpipe.data.loader import check_base_tokenizer, open_tokenizer
from maxpipe.devices.cluster import announced_processes, is_cluster, job_of_process
from maxpipe.generate.text import read_prompt
from maxpipe.migration.orbax_arrays import find_item
from maxpipe.telemetry.trackers import require_trackers
from maxpipe.training.run_directory import RunDirectory

Part = Callable[[], object]


def check_inputs(loaded: Loaded) -> None:
    """Refuse inputs that a run cannot use, as far as that can be told without JAX.

    A run of several processes is left alone, because the others wait for this one and do not expect
    it to exit; so is a finished run, which reads nothing.

    Raises:
      ConfigError: something is missing or unusable; it lists all problems.
    """
    if announced_processes() > 1 or is_cluster():
        return
    config = derive_known(loaded.config)
    directory, resume = RunDirectory(config), config.checkpoint.resume
    store = StepsDirectory(directory.checkpoints)
    if step_since(resume, job_of_process(), store.steps(), store.record) is not None:
        resume = AUTO  # as `followed_once`
    if resume in NEWEST and max(store.steps(), default=0) >= config.steps:
        return
    parts: list[Part] = [
        partial(_check_executable, config.compile.load),
        directory.check_place,
        partial(require_trackers, config.telemetry),
    ]
    if not config.checkpoint.mirror:  # which may hold the finished run
        splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
        documents = [partial(open_sources, config.data, split) for split in splits]
        parts = [partial(read_prompts, config), *documents, *parts]
        if not config.checkpoint.replica_every:
            parts.append(partial(_check_beginning, config, resume, store))
    _check_all(parts, simulated_mesh_problems(loaded))


def read_prompts(config: Config) -> list[list[int]]:
    """Return the token ids of each text of `eval.prompts`.

    Raises:
      ConfigError: one is empty, too long, or has tokens that the model does not have.
    """
    tokenizer = open_tokenizer(config)
    return [read_prompt(text, tokenizer, config, "eval.prompts") for text in config.eval.prompts]


def _check_all(parts: Sequence[Part], also: Sequence[Problem] = ()) -> None:
    """Call all parts, and raise one ConfigError with the problems of all, each once, and `also`."""
    problems: list[Problem] = []
    for part in parts:
        try:
            part()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*dict.fromkeys(problems), *also)


def _check_beginning(config: Config, resume: str, store: StepsDirectory) -> None:
    """Check what a run starts from that has no checkpoint to continue from."""
    if step_to_resume(resume, store.steps(), str(store)) is None:
        _check_all([partial(_find_weights, config), partial(check_base_tokenizer, config)])


def _find_weights(config: Config) -> None:
    """Find what `init_from` names, without comparing it with the model."""
    scheme = split_scheme(config.init_from)[0]
    if scheme == RUN:
        find_step(open_steps(run_of(config.init_from), "init_from"), None, "init_from")
    elif scheme == MAXTEXT:
        directory = maxtext_directory(config.init_from)
        try:
            find_item(Path(directory))
        except (OSError, ValueError) as error:
            message = f"cannot read {directory}: {error}"
            raise ConfigError(Problem("init_from", message)) from None
    elif config.init_from:
        read_shape(config.init_from, "init_from")


def _check_executable(file: str) -> None:
    if file and not Path(file).is_file():
        reason = "it is no regular file" if Path(file).exists() else "No such file or directory"
        raise ConfigError(Problem("compile.load", f"cannot read {file}: {reason}"))
