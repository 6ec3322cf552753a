"""Check the run: its directory, data, checkpoints, learning rate and telemetry."""

import math
import os
import re
from collections.abc import Mapping

from maxpipe.config.catalog import SOURCES, TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import ACCEPT, GROUPS
from maxpipe.config.model_places import (
    CHATML,
    LEAST_PLAIN_IDS,
    MAXTEXT,
    PLAIN_IDS,
    RUN,
    SCHEME,
    TOKENIZER,
    folder_of,
    is_url,
    num_plain_ids,
    split_scheme,
    tokenizer_folder,
    tokenizer_path,
)
from maxpipe.config.rules.rule import Updates, rule
from maxpipe.config.sections import Config
from maxpipe.config.slices import canonical_topology
from maxpipe.config.values import nearest

LONGEST_NAME = 255  # bytes of a name in file systems
LONGEST_PATH = 3500  # bytes of a path, below the limit of 4096: names below it need room
LEAST_SPIKE_WINDOW = 16
LEAST_SHARE = 0.001  # least share of a source in a mixture
_MIXTURE_FIELDS = ("source", "path", "weight")
_SHRINKABLE = ("data", "fsdp")  # axes that split rows, but no dimension that the model needs split


@rule("run_name")
def check_run_name(c: Config) -> None:
    """Check that the run's name can name a directory and is not a path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.run_name):
        message = (
            f"{c.run_name!r} is not a name without a path: letters, digits, '.', '_' and '-', "
            "starting with a letter or digit; output_dir takes the directory"
        )
        raise ConfigError(Problem("run_name", message))
    if len(c.run_name) > LONGEST_NAME:
        message = f"has {len(c.run_name)} characters; a directory's name has {LONGEST_NAME} at most"
        raise ConfigError(Problem("run_name", message))


@rule("init_from")
def check_init_from(c: Config) -> None:
    """Check the form of `init_from`."""
    scheme, directory = split_scheme(c.init_from)
    if scheme in (MAXTEXT, RUN):
        if not directory or is_url(directory):
            message = (
                f"{c.init_from!r} is not of the form {scheme}DIR, with a directory of this "
                f"machine; copy the {'run' if scheme == RUN else 'step'} from the object store, or "
                "mount it"
            )
            raise ConfigError(Problem("init_from", message))
        return
    folder = folder_of(c.init_from)
    is_named = c.init_from.startswith(SCHEME) and folder and not folder.startswith("//")
    if c.init_from and not is_named and not is_url(folder):
        message = (
            f"{c.init_from!r} has none of the forms run:DIR (another run), hf:DIR (a folder with "
            "config.json and *.safetensors), hf:org/name (a model of the hub), s3://... or "
            "gs://... (a folder as of hf:DIR), maxtext:DIR (a step of MaxText)"
        )
        raise ConfigError(Problem("init_from", message))


@rule("output_dir", "data.cache_dir", "compile.cache_dir")
def check_directories(c: Config) -> None:
    """Refuse object stores where a directory is needed."""
    directories = {
        "output_dir": c.output_dir,
        "data.cache_dir": c.data.cache_dir,
        "compile.cache_dir": c.compile.cache_dir,
    }
    problems = []
    for key, path in directories.items():
        if key == "output_dir" and not path.strip():
            problems.append(Problem(key, "is empty; name a directory, such as runs or ."))
        names = [os.fsencode(name) for name in path.split("/")]
        longest = max(len(name) for name in names)
        if longest > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
            message = (
                f"has {len(path)} characters; a path may have {LONGEST_PATH} bytes, each name in "
                f"it {LONGEST_NAME}"
            )
            problems.append(Problem(key, message))
        if "://" in path:
            message = (
                f"{path!r} is not a directory: renames must be atomic there, so give a local or "
                "shared file system, such as NFS"
            )
            if key == "output_dir":
                message += "; checkpoint.mirror keeps a copy of every checkpoint in an object store"
            problems.append(Problem(key, message))
    if problems:
        raise ConfigError(*problems)


@rule("data.tokenizer")
def check_tokenizer(c: Config) -> None:
    """Check that the tokenizer is in the catalogue, a path, or the file of a folder."""
    name, names = c.data.tokenizer, [*TOKENIZERS]
    if name.startswith(SCHEME):
        _check_tokenizer_folder(name)
        return
    if name.startswith(PLAIN_IDS):
        if not num_plain_ids(name):
            message = (
                f"{name!r} is not of the form {PLAIN_IDS}N, with a number of ids of at least "
                f"{LEAST_PLAIN_IDS}"
            )
            raise ConfigError(Problem("data.tokenizer", message))
        return
    is_path = "/" in name or name.endswith((".json", ".model")) or os.path.exists(name)
    if name not in names and not is_path:
        message = (
            f"{name!r} is neither {', '.join(names)} nor the path of a tokenizer.json or "
            f".model, nor hf:DIR, nor {PLAIN_IDS}N{nearest(name, names)}"
        )
        raise ConfigError(Problem("data.tokenizer", message))


def _check_tokenizer_folder(value: str) -> None:
    """Check that the folder of `hf:DIR` has a tokenizer; others are read later."""
    file = tokenizer_path(value)
    if tokenizer_folder(value) or os.path.isfile(file):
        return
    pieces = os.path.join(folder_of(value), "tokenizer.model")
    message = f"there is no {file}; "
    if os.path.isfile(pieces):
        message += f"data.tokenizer={pieces} takes the SentencePiece model that is there"
    else:
        message += (
            f"give hf:DIR with a downloaded folder that has a {TOKENIZER}, as save_pretrained of "
            "transformers writes"
        )
    raise ConfigError(Problem("data.tokenizer", message))


@rule(
    "data.tokenizer",
    "data.source",
    "data.eval_path",
    "data.mixture",
    "model.vocab_size",
    "model.unpadded_vocab_size",
    writes=("data.tokenizer",),
)
def derive_tokenizer(c: Config) -> Updates:
    """Draw random ids from the model's vocabulary where it is smaller than the tokenizer's.

    Otherwise ids are drawn from the tokenizer's, so that a run always draws the same ones.
    """
    num_ids, name = c.model.num_token_ids, c.data.tokenizer
    if num_plain_ids(name) > num_ids:
        message = f"has ids that model.vocab_size={num_ids} has not; use {PLAIN_IDS}{num_ids}"
        raise ConfigError(Problem("data.tokenizer", f"{name} {message}"))
    read = [entry["source"] for entry in c.data.mixture] or [c.data.source]
    if c.data.eval_path or any(SOURCES[source].needs_tokenizer for source in read):
        return {}
    is_smaller = name in TOKENIZERS and num_ids < TOKENIZERS[name].vocab_size
    return {"data.tokenizer": f"{PLAIN_IDS}{num_ids}"} if is_smaller else {}


@rule("data.source", "data.path", "data.eval_path", "data.mixture")
def check_data_path(c: Config) -> None:
    """Refuse a path for a source that reads none."""
    source = c.data.source
    if c.data.eval_path and _reads_no_path(source):
        message = (
            f"data.source={source} reads no path, and it reads the validation set"
            f"{' of a mixture, too' if c.data.mixture else ''}: {_propose_readers('data.source=')}"
        )
        raise ConfigError(Problem("data.eval_path", message))
    if c.data.path and not c.data.mixture and _reads_no_path(source):
        message = f"data.source={source} reads no path: {_propose_readers('data.source=')}"
        raise ConfigError(Problem("data.path", message))


@rule("data.chat_template", "data.chat_date", "data.source", "data.mixture", "data.tokenizer")
def check_chat_template(c: Config) -> None:
    """Check that conversations have a template, and that one is given for conversations only."""
    read = [entry["source"] for entry in c.data.mixture] or [c.data.source]
    chats = [source for source in read if source in SOURCES and SOURCES[source].is_chat]
    value = c.data.chat_template
    for key, given in (("data.chat_template", value), ("data.chat_date", c.data.chat_date)):
        if given and not chats:
            names = ", ".join(name for name, facts in SOURCES.items() if facts.is_chat)
            message = (
                f"is for conversations, which data.source={read[0]} has not; these do: {names}"
            )
            raise ConfigError(Problem(key, message))
    if chats and not value and c.data.tokenizer in TOKENIZERS:
        message = (
            f"data.tokenizer={c.data.tokenizer} has no chat template of its own: set "
            f"data.chat_template={CHATML}, or give a file with a Jinja template"
        )
        raise ConfigError(Problem("data.chat_template", message))
    if value not in ("", CHATML) and not os.path.exists(value):
        message = f"{value!r} is neither {CHATML} nor a file{nearest(value, [CHATML])}"
        raise ConfigError(Problem("data.chat_template", message))


@rule("data.column", "data.source", "data.mixture", "data.eval_path")
def check_column(c: Config) -> None:
    """Refuse a column for sources that have none to choose."""
    read = [entry["source"] for entry in c.data.mixture]
    if c.data.eval_path or not read:
        read.append(c.data.source)
    with_columns = [name for name, facts in SOURCES.items() if facts.has_column]
    if c.data.column and not {*read} & {*with_columns}:
        message = (
            f"data.source={read[0]} reads no column of this name, only {', '.join(with_columns)} do"
        )
        raise ConfigError(Problem("data.column", message))


def _reads_no_path(source: object) -> bool:
    return isinstance(source, str) and source in SOURCES and not SOURCES[source].needs_path


def _propose_readers(prefix: str) -> str:
    readers = [name for name, facts in SOURCES.items() if facts.needs_path and name != "text"]
    return f"set {prefix}text (or {', '.join(readers)}), or leave the path out"


@rule("data.mixture", "data.path")
def check_mixture(c: Config) -> None:
    """Check the entries of a mixture: fields, sources and weights."""
    problems: list[str] = []
    for number, entry in enumerate(c.data.mixture, 1):
        problems += [f"entry {number}{problem}" for problem in _entry_problems(entry)]
    problems = problems or _small_shares([entry["weight"] for entry in c.data.mixture])
    if c.data.mixture and c.data.path:
        problems.append(
            "data.path has no effect next to it; "
            "put the path into an entry, or empty one of the two keys"
        )
    if problems:
        raise ConfigError(*(Problem("data.mixture", problem) for problem in problems))


def _entry_problems(entry: Mapping[str, object]) -> list[str]:
    problems = [
        f" has no {name!r}, only {', '.join(_MIXTURE_FIELDS)}{nearest(name, [*_MIXTURE_FIELDS])}"
        for name in entry
        if name not in _MIXTURE_FIELDS
    ]
    source, weight, sources = entry.get("source"), entry.get("weight"), [*SOURCES]
    if source not in sources:
        legal = f"{', '.join(sources)}{nearest(str(source), sources)}"
        problems.append(f": source {source!r} is not one of {legal}")
    if entry.get("path") and _reads_no_path(source):
        problems.append(f": source {source} reads no path: {_propose_readers('source: ')}")
    if not isinstance(entry.get("path", ""), str):
        problems.append(": the path is a number; quote it if that is its name")
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
        problems.append(f" needs a finite weight above 0; got {weight!r}")
    return problems


def _small_shares(weights: list[float]) -> list[str]:
    total = math.fsum(weights)
    return [
        f"entry {number}: weight {weight} is {weight / total:.2g} of all; "
        f"the least share is {LEAST_SHARE}"
        for number, weight in enumerate(weights, 1)
        if weight / total < LEAST_SHARE
    ]


@rule("checkpoint.resume")
def check_resume(c: Config) -> None:
    """Check that `checkpoint.resume` is a word that it knows or a step."""
    value = c.checkpoint.resume
    words = ["auto", "never", "must"]
    if value not in words and not (value.isascii() and value.isdigit()):
        message = (
            f"{value!r} is not one of auto, never, must or the number of a step"
            f"{nearest(value, words)}"
        )
        raise ConfigError(Problem("checkpoint.resume", message))


@rule("checkpoint.accept_changes")
def check_accept_changes(c: Config) -> None:
    """Check that the changes to accept are groups of keys."""
    unknown = [name for name in c.checkpoint.accept_changes if name not in GROUPS]
    if unknown:
        raise ConfigError(
            *(
                Problem(
                    ACCEPT, f"{name!r} is not one of {', '.join(GROUPS)}{nearest(name, [*GROUPS])}"
                )
                for name in unknown
            )
        )


@rule("checkpoint.mirror")
def check_mirror(c: Config) -> None:
    """Check that the mirror is a URL of an object store, and no pattern."""
    url = c.checkpoint.mirror
    if url and not re.fullmatch(r"(s3|gs)://[^/]+(/.*)?", url):
        message = (
            f"{url!r} is not a place in an object store, such as s3://bucket/runs or "
            "gs://bucket/runs"
        )
        raise ConfigError(Problem("checkpoint.mirror", message))
    if re.search(r"[*?[]", url):
        message = (
            f"{url!r} holds *, ? or [, which libraries of object stores take for a pattern, so "
            "that steps of other runs could be deleted; give a place without them"
        )
        raise ConfigError(Problem("checkpoint.mirror", message))


@rule("checkpoint.every", "checkpoint.keep_every")
def check_keep_every(c: Config) -> None:
    """Check that steps to keep for good are saved at all."""
    every, keep_every = c.checkpoint.every, c.checkpoint.keep_every
    if keep_every and (not every or keep_every % every):
        legal = (
            f"a multiple of checkpoint.every={every}" if every else "0, since checkpoint.every=0"
        )
        message = f"expected {legal}: only saved steps can be kept; got {keep_every}"
        raise ConfigError(Problem("checkpoint.keep_every", message))


@rule("checkpoint.every", "checkpoint.keep_best", "eval.every")
def check_keep_best(c: Config) -> None:
    """Check that there are steps which are both saved and evaluated."""
    saved, evaluated = c.checkpoint.every, c.eval.every
    if not c.checkpoint.keep_best:
        return
    intervals = {"eval.every": evaluated, "checkpoint.every": saved}
    missing = [key for key, interval in intervals.items() if not interval]
    if missing:
        message = (
            "the best checkpoints have the lowest evaluation loss: "
            f"give {' and '.join(missing)}, which is 0, or keep_best=0"
        )
        raise ConfigError(Problem("checkpoint.keep_best", message))
    if saved % evaluated and evaluated % saved:
        message = (
            f"checkpoint.every={saved} and eval.every={evaluated} seldom fall on the same step, "
            "and only a saved step that is evaluated can be among the best: "
            "make one of them a multiple of the other"
        )
        raise ConfigError(Problem("checkpoint.keep_best", message))


@rule("mesh.elastic", "checkpoint.every", "checkpoint.every_minutes", "compile.load")
def check_elastic(c: Config) -> None:
    """Check that elastic axes split the batch, and that a run can go on with fewer hosts."""
    axes, key = c.mesh.elastic.axes, "mesh.elastic.axes"
    problems = [
        f"{axis!r} is not one of {', '.join(_SHRINKABLE)}{nearest(axis, [*_SHRINKABLE])}: a model "
        "has no place on fewer devices of another axis"
        for axis in axes
        if axis not in _SHRINKABLE
    ]
    if len({*axes}) < len(axes):
        problems.append(f"names an axis twice: {', '.join(axes)}")
    if axes and not (c.checkpoint.every or c.checkpoint.every_minutes):
        problems.append(
            "without checkpoints the run cannot go on with fewer hosts: give checkpoint.every"
        )
    if axes and c.compile.load:
        problems.append(
            "compile.load names a step for all hosts, with which fewer cannot go on: leave out one "
            "of the two keys"
        )
    if problems:
        raise ConfigError(*(Problem(key, problem) for problem in problems))


@rule("optimizer.spike_window")
def check_spike_window(c: Config) -> None:
    """Check that a standard deviation of the window means something."""
    window = c.optimizer.spike_window
    if 0 < window < LEAST_SPIKE_WINDOW:
        message = (
            f"a deviation needs at least {LEAST_SPIKE_WINDOW} steps, or 0 = never; got {window}"
        )
        raise ConfigError(Problem("optimizer.spike_window", message))


@rule(
    "optimizer.decay_steps",
    "optimizer.warmup_steps",
    "steps",
    "epochs",
    writes=("optimizer.decay_steps", "optimizer.warmup_steps"),
)
def derive_learning_rate_steps(c: Config) -> Updates:
    """Derive the steps of decay and warm-up from the steps of the run, once these are known."""
    if c.epochs:
        return {}
    decay, warmup = c.optimizer.decay_steps, c.optimizer.warmup_steps
    if decay == -1:
        decay = c.steps
    if warmup == -1:
        warmup = decay // 20
    if warmup > decay:
        message = (
            f"{warmup} is more than optimizer.decay_steps={decay}; "
            "give at most that, or -1 for a twentieth"
        )
        raise ConfigError(Problem("optimizer.warmup_steps", message))
    return {"optimizer.decay_steps": decay, "optimizer.warmup_steps": warmup}


@rule("telemetry.profile_steps", "steps")
def check_profile_steps(c: Config) -> None:
    """Check that the steps to profile are a range within the run."""
    steps = c.telemetry.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= c.steps):
        message = (
            f"expected [] or [first, last] with 1 <= first <= last <= steps={c.steps}; got {steps}"
        )
        raise ConfigError(Problem("telemetry.profile_steps", message))


@rule("telemetry.wandb", "telemetry.mlflow", "telemetry.log_every")
def check_trackers(c: Config) -> None:
    """Refuse trackers that would get nothing."""
    if not c.telemetry.log_every:
        message = "gets every telemetry.log_every-th step, which is 0: give a number, or leave this"
        keys = [key for key in ("wandb", "mlflow") if getattr(c.telemetry, key)]
        if keys:
            raise ConfigError(*(Problem(f"telemetry.{key}", f"{message} empty") for key in keys))


@rule("compile.topology", "compile.num_slices", writes=("compile.topology",))
def check_topology(c: Config) -> Updates:
    """Turn `compile.topology` into libtpu's name, and check that slices are of a TPU."""
    name, slices = c.compile.topology, c.compile.num_slices
    if slices > 1 and name in ("", "cpu"):
        message = f"{slices} slices need a TPU topology: give compile.topology, such as v5p:4x4x4"
        raise ConfigError(Problem("compile.num_slices", message))
    if name in ("", "cpu"):
        return {}
    try:
        return {"compile.topology": canonical_topology(name)}
    except ValueError as error:
        raise ConfigError(Problem("compile.topology", str(error))) from None


def check_trains(c: Config) -> None:
    """Refuse what is for the compile command only; not a rule, since that command takes it.

    Raises:
      ConfigError: an executable is to be stored.
    """
    if c.compile.save:
        remedy = "give it to python -m maxpipe.compile, and compile.load=FILE here"
        raise ConfigError(Problem("compile.save", f"training stores no executable; {remedy}"))


RUN_RULES = (
    check_run_name,
    check_init_from,
    check_directories,
    check_tokenizer,
    check_data_path,
    check_mixture,
    check_chat_template,
    check_column,
    derive_tokenizer,
    check_resume,
    check_accept_changes,
    check_mirror,
    check_keep_every,
    check_keep_best,
    check_elastic,
    check_spike_window,
    derive_learning_rate_steps,
    check_profile_steps,
    check_trackers,
    check_topology,
)
