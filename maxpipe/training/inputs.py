"""Check what a run reads before its first step: tokenizer, documents and initial weights.

They are opened one after the other, each where it is needed. A run of one process checks beforehand
what needs no JAX, which takes seconds to import, so that a user learns of these problems at once.
"""

from collections.abc import Callable
from functools import partial

from maxpipe.checkpoint.steps import (
    AUTO,
    NEWEST,
    StepsDirectory,
    step_since,
    step_to_resume,
)
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import read_shape
from maxpipe.config.load import Loaded, derive_known, simulated_mesh_problems
from maxpipe.config.model_places import MAXTEXT, RUN, split_scheme
from maxpipe.config.sections import Config
from maxpipe.data.documents import Split, open_sources
from maxpipe.data.loader import check_base_tokenizer, open_tokenizer
from maxpipe.devices.cluster import announced_processes, is_cluster, job_of_process
from maxpipe.telemetry.trackers import require_trackers
from maxpipe.training.run_directory import RunDirectory


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
    parts: list[Callable[[], object]] = [
        directory.check_place,
        partial(require_trackers, config.telemetry),
    ]
    if not config.checkpoint.mirror:  # which may hold the finished run
        splits: list[Split] = ["train", "eval"] if config.eval.every else ["train"]
        documents = [partial(open_sources, config.data, split) for split in splits]
        parts = [partial(open_tokenizer, config), *documents, *parts]
        if not config.checkpoint.replica_every:
            parts.append(partial(_check_beginning, config, resume, store))
    problems: list[Problem] = []
    for part in parts:
        try:
            part()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*dict.fromkeys(problems), *simulated_mesh_problems(loaded))


def _check_beginning(config: Config, resume: str, store: StepsDirectory) -> None:
    if step_to_resume(resume, store.steps(), str(store)) is None and config.init_from:
        if split_scheme(config.init_from)[0] not in (RUN, MAXTEXT):
            read_shape(config.init_from, "init_from")
        check_base_tokenizer(config)
