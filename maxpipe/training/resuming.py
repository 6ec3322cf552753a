"""Compare a run with its earlier starts, or its other processes, and continue it from a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import maxpipe
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.steps import AUTO, NEWEST, RESUME, Job, step_since, step_to_resume
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import ACCEPT, Change, group_of, is_allowed
from maxpipe.config.model_places import RUN, maxtext_directory, open_folder
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.layout import is_csv
from maxpipe.config.sections import Config
from maxpipe.config.terminal import Note
from maxpipe.data.chat_template import trained_template
from maxpipe.data.fingerprint import DataFingerprint, fingerprint_data
from maxpipe.data.loader import moved_state
from maxpipe.devices import processes
from maxpipe.devices.agreement import source_digest
from maxpipe.storage.local_files import sampled_digest
from maxpipe.storage.model_folders import directory_digest
from maxpipe.training.run_directory import Meta, RunDirectory

FINGERPRINT, VERSIONS = "fingerprint", "versions"  # in a checkpoint's meta
DOCUMENTS = "documents"  # in the fingerprint: number of training documents
DEPENDENCIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_RUNTIME = "libtpu"  # installed where it is needed


def followed_once(
    config: Config, checkpointer: Checkpointer, job: Job, log: Callable[[str], None]
) -> Config:
    """Let the run resume from its newest step if an earlier attempt has already gone back.

    All processes call this; see `maxpipe.checkpoint.steps`.
    """
    resume = config.checkpoint.resume
    if resume in NEWEST:
        return config
    step = step_since(resume, job, checkpointer.resumable(), checkpointer.record)
    step = processes.of_first_process(-1 if step is None else step)
    if step < 0:
        return config
    log(
        f"{RESUME}={resume} was followed by an earlier attempt of this job, which has reached step "
        f"{step}: this one continues from the newest step"
    )
    return replace(config, checkpoint=replace(config.checkpoint, resume=AUTO))


def dated(config: Config, directory: RunDirectory, note: Note) -> Config:
    """Set the date that the chat template writes: the one of earlier starts, or today.

    All processes call this.
    """
    template = None if config.data.chat_date else trained_template(config.data)
    if template is None or not template.writes_date:
        return config
    text = directory.chat_date()
    day = datetime.fromisoformat(text) if text else datetime.now()
    first = date.fromordinal(processes.of_first_process(day.toordinal())).isoformat()
    note(f"data.chat_date={first}: the day on which the run began")
    return replace(config, data=replace(config.data, chat_date=first))


def step_to_continue(config: Config, checkpointer: Checkpointer) -> int | None:
    """Return `step_to_resume`; replicas in memory count unless the configuration names a step."""
    resume = config.checkpoint.resume
    steps = checkpointer.resumable() if resume in NEWEST else checkpointer.steps()
    return step_to_resume(resume, steps, checkpointer.place)


def has_other_optimizer(changed: Sequence[Change]) -> bool:
    return any(change.key == "optimizer.name" for change in changed)


def continued(position: np.ndarray, config: Config, num_documents: int, meta: Meta) -> np.ndarray:
    """Return the data position, int64 [rows, 3], at which a run continues from a checkpoint's."""
    num_before = (meta.get(FINGERPRINT) or {}).get(DOCUMENTS)
    if "data" in config.checkpoint.accept_changes and num_before:
        return moved_state(position, num_before, num_documents)
    return position


def check_continuity(
    directory: RunDirectory, fingerprint: DataFingerprint, meta: Meta, place: str
) -> list[Change]:
    """Return the allowed changes since a checkpoint at `place`, keys first, then data; raises
    ConfigError if something differs that must not, unless `checkpoint.accept_changes` names it.
    """
    changed = directory.check(meta, place)
    saved = meta.get(FINGERPRINT)
    if saved is None:
        return changed  # an earlier version wrote it
    data = fingerprint.changes_since(saved)
    problems = [
        Problem(
            change.key,
            f"is not what the checkpoints in {place} were made with, {change.kind}: {change.text}; "
            f"{ACCEPT}=[{group_of(change.key)}] continues with the change",
        )
        for change in data
        if not is_allowed(directory.config, change.key)
    ]
    if problems:
        raise ConfigError(*problems, directory.advice(place))
    return changed + [Change(change.key, None, f"{change.kind}: {change.text}") for change in data]


def version_changes(now: Mapping[str, str], saved: Mapping[str, str]) -> list[Change]:
    """Return the packages whose versions differ from those that a checkpoint records."""
    return [
        Change(name, saved[name], version)
        for name, version in now.items()
        if saved.get(name, version) != version
    ]


def run_contents(config: Config) -> dict[str, str]:
    """Return digests and versions of what the result of a run depends on, by name.

    What cannot be read has its error in place of a digest: opening it reports that later.
    """
    try:
        contents = fingerprint_data(config).digests()
    except ConfigError as error:
        contents = {problem.key: problem.message for problem in error.problems}
    for key, digest in _PATHS.items():
        if value := str(get(config, key)):
            try:
                contents[key] = digest(key, value)
            except (ConfigError, OSError) as error:
                contents[key] = str(error)
    contents |= _own_code(config)
    versions = package_versions() | {_RUNTIME: installed_version(_RUNTIME)}
    contents |= {f"version of {name}": version for name, version in versions.items()}
    return contents | {"code of maxpipe": source_digest()}


def package_versions() -> dict[str, str]:
    """Return the versions of maxpipe and of the packages that decide what a step computes."""
    # maxpipe's own version comes from the package: run from a checkout, it need not be installed.
    installed = {name: metadata.version(name) for name in DEPENDENCIES}
    return {"maxpipe": maxpipe.__version__} | installed


def _own_code(config: Config) -> dict[str, str]:
    digests = {}
    for key, option in OPTIONS.items():
        variant = (option.bounds.variants or {}).get(str(get(config, key)))
        package = getattr(variant, "implementation", "").partition(":")[0].partition(".")[0]
        if package not in ("", "maxpipe") and (spec := find_spec(package)) and spec.origin:
            file = Path(spec.origin)
            files = sorted(file.parent.rglob("*.py")) if spec.submodule_search_locations else [file]
            digests[f"code of {package}"] = directory_digest(file.parent, files)
    return digests


def installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _model_digest(key: str, value: str) -> str:
    if value.startswith(RUN):
        return RUN  # its newest step may change meanwhile; `RunWeights` compares the one it reads
    if directory := maxtext_directory(value):
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return directory_digest(Path(directory), files)
    return open_folder(value, key).digest()


def _file_digest(key: str, value: str) -> str:
    return sampled_digest(value, Path(value).stat().st_size)


# Keys whose values are paths, and what to compare in their place.
_PATHS: Mapping[str, Callable[[str, str], str]] = {
    "model.from_hf": _model_digest,
    "init_from": _model_digest,
    "pipeline.schedule": lambda key, name: _file_digest(key, name) if is_csv(name) else name,
    "compile.load": _file_digest,
}
