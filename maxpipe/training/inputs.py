"""Open what a run reads before its first step: tokenizer, documents and initial weights.

They are opened one after the other, each where it is needed. If one of them or the run directory is
refused, the others are opened as well, so that a user learns of all problems at once. A run of one
process checks whatever needs no JAX before it imports JAX, which takes seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    config = derive_known(loaded.config)
    if announced_processes() > 1 or is_cluster() or _is_finished(config):
        return
    # The mirror, if there is one, may hold the finished run.
    parts: list[Part] = [
        *([] if config.checkpoint.mirror else _readers(config)),
        partial(_check_executable, config.compile.load),
        RunDirectory(config).check_place,
        partial(require_trackers, config.telemetry),
    ]
    if not config.checkpoint.mirror and not config.checkpoint.replica_every:
        parts += [
            partial(_open_beginning, config, part) for part in (_find_weights, check_base_tokenizer)
        ]
    if problems := _problems_of(parts):
        raise ConfigError(*problems, *simulated_mesh_problems(loaded))


@contextmanager
def naming_all_inputs(config: Config) -> Iterator[None]:
    """Add the problems of a run's inputs, which are opened only then, to a ConfigError.

    Args:
      config: the resolved configuration.

    Raises:
      ConfigError: the error raised inside, with the problems of all inputs, each listed once.
    """
    try:
        yield
    except ConfigError as error:
        problems = dict.fromkeys([*error.problems, *input_problems(config)])
        raise ConfigError(*problems) from error


def input_problems(config: Config) -> list[Problem]:
    """Return what is wrong with tokenizer, documents, and the checkpoint or weights to start from.

    The latter two are left out if there is a mirror, which may have checkpoints.
    """
    # Imports JAX, for which `check_inputs` should not wait.
    from maxpipe.training.initial_weights import open_weights

    parts = _readers(config)
    if not config.checkpoint.mirror:
        parts.append(partial(_open_beginning, config, open_weights))
    return _problems_of(parts)


def read_prompts(config: Config) -> list[list[int]]:
    """Return the token ids of each text of `eval.prompts`.

    Raises:
      ConfigError: one is empty, too long, or has tokens that the model does not have.
    """
    tokenizer = open_tokenizer(config)
    return [read_prompt(text, tokenizer, config, "eval.prompts") for text in config.eval.prompts]


def _problems_of(parts: Sequence[Part]) -> list[Problem]:
    """Return the problems that parts raise, each once."""
    problems: list[Problem] = []
    for part in parts:
        try:
            part()
        except ConfigError as error:
            problems += error.problems
    return [*dict.fromkeys(problems)]


def _readers(config: Config) -> list[Part]:
    """Return functions that open the tokenizer, with the prompts, and the documents."""
    splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
    documents = [partial(open_sources, config.data, split) for split in splits]
    return [partial(read_prompts, config), *documents]


def _is_finished(config: Config) -> bool:
    """Return whether a step that ends the run is in its directory."""
    store, resume = _resume(config)
    return resume in NEWEST and max(store.steps(), default=0) >= config.steps


def _open_beginning(config: Config, open_part: Callable[[Config], object]) -> None:
    """Open what a run starts from that has no checkpoint to continue from."""
    store, resume = _resume(config)
    if step_to_resume(resume, store.steps(), str(store)) is None:
        open_part(config)


def _resume(config: Config) -> tuple[StepsDirectory, str]:
    """Return the checkpoints, and the `checkpoint.resume` that this attempt of its job follows."""
    store = StepsDirectory(RunDirectory(config).checkpoints.absolute())  # like a checkpointer's
    resume = config.checkpoint.resume
    step = step_since(resume, job_of_process(), store.steps(), store.record)
    return store, resume if step is None else AUTO


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
