"""Check the run: its directory, data, checkpoints, learning rate and telemetry."""

import math
import os
import re
from collections.abc import Iterator, Mapping

from maxpipe.config.catalog import SOURCES, TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
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
from maxpipe.config.rules.rule import Derived, Wrong, check, derive, rules_in
from maxpipe.config.sections import Config
from maxpipe.config.slices import canonical_topology
from maxpipe.config.values import nearest

LONGEST_NAME = 255  # bytes of a name in file systems
LONGEST_PATH = 3500  # bytes of a path, below the limit of 4096: names below it need room
LEAST_SPIKE_WINDOW = 16
LEAST_SHARE = 0.001  # least share of a source in a mixture
_MIXTURE_FIELDS = ("source", "path", "weight")
_SHRINKABLE = ("data", "fsdp")  # axes that split rows, but no dimension that the model needs split


@check
def check_run_name(c: Config) -> Wrong:
    """Check that the run's name can name a directory and is not a path."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.run_name):
        yield (
            "run_name",
            f"{c.run_name!r} is not a name without a path: letters, digits, '.', '_' and '-', "
            "starting with a letter or digit; output_dir takes the directory",
        )
    elif (length := len(c.run_name)) > LONGEST_NAME:
        limit = f"a directory's name has {LONGEST_NAME} at most"
        yield "run_name", f"has {length} characters; {limit}"


@check
def check_init_from(c: Config) -> Wrong:
    """Check the form of `init_from`."""
    scheme, directory = split_scheme(c.init_from)
    folder = folder_of(c.init_from)
    is_named = c.init_from.startswith(SCHEME) and folder and not folder.startswith("//")
    if scheme in (MAXTEXT, RUN):
        if not directory or is_url(directory):
            what = "run" if scheme == RUN else "step"
            yield (
                "init_from",
                f"{c.init_from!r} is not of the form {scheme}DIR, with a directory of this "
                f"machine; copy the {what} from the object store, or mount it",
            )
    elif c.init_from and not is_named and not is_url(folder):
        yield (
            "init_from",
            f"{c.init_from!r} has none of the forms run:DIR (another run), hf:DIR (a folder with "
            "config.json and *.safetensors), hf:org/name (a model of the hub), s3://... or "
            "gs://... (a folder as of hf:DIR), maxtext:DIR (a step of MaxText)",
        )


@check
def check_directories(c: Config) -> Wrong:
    """Refuse object stores where a directory is needed."""
    directories = {
        "output_dir": c.output_dir,
        "data.cache_dir": c.data.cache_dir,
        "compile.cache_dir": c.compile.cache_dir,
    }
    for key, path in directories.items():
        if key == "output_dir" and not path.strip():
            yield key, "is empty; name a directory, such as runs or ."
        longest = max(len(os.fsencode(name)) for name in path.split("/"))
        if longest > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
            limit = f"a path may have {LONGEST_PATH} bytes, each name in it {LONGEST_NAME}"
            yield key, f"has {len(path)} characters; {limit}"
        if "://" in path:
            message = (
                f"{path!r} is not a directory: renames must be atomic there, so give a local or "
                "shared file system, such as NFS"
            )
            if key == "output_dir":
                message += "; checkpoint.mirror keeps a copy of every checkpoint in an object store"
            yield key, message


@check
def check_tokenizer(c: Config) -> Wrong:
    """Check that the tokenizer is in the catalogue, a path, or the file of a folder."""
    name, names = c.data.tokenizer, [*TOKENIZERS]
    is_path = "/" in name or name.endswith((".json", ".model")) or os.path.exists(name)
    if name.startswith(SCHEME):
        if message := _missing_tokenizer(name):
            yield "data.tokenizer", message
    elif name.startswith(PLAIN_IDS):
        if not num_plain_ids(name):
            form = f"{PLAIN_IDS}N, with a number of ids of at least {LEAST_PLAIN_IDS}"
            yield "data.tokenizer", f"{name!r} is not of the form {form}"
    elif name not in names and not is_path:
        yield (
            "data.tokenizer",
            f"{name!r} is neither {', '.join(names)} nor the path of a tokenizer.json or .model, "
            f"nor hf:DIR, nor {PLAIN_IDS}N{nearest(name, names)}",
        )


def _missing_tokenizer(value: str) -> str:
    """Return what is wrong with the folder of `hf:DIR`; folders elsewhere are read later."""
    file = tokenizer_path(value)
    if tokenizer_folder(value) or os.path.isfile(file):
        return ""
    pieces = os.path.join(folder_of(value), "tokenizer.model")
    if os.path.isfile(pieces):
        remedy = f"data.tokenizer={pieces} takes the SentencePiece model that is there"
        return f"there is no {file}; {remedy}"
    remedy = f"give hf:DIR with a downloaded folder that has a {TOKENIZER}, as save_pretrained of"
    return f"there is no {file}; {remedy} transformers writes"


@check
def check_mixture(c: Config) -> Wrong:
    """Check the entries of a mixture: fields, sources and weights."""
    mixture, key = c.data.mixture, "data.mixture"
    problems = [
        f"entry {number}{problem}"
        for number, entry in enumerate(mixture, 1)
        for problem in _entry_problems(entry)
    ]
    if not problems:
        total = math.fsum(entry["weight"] for entry in mixture)
        problems = [
            f"entry {number}: weight {entry['weight']} is {entry['weight'] / total:.2g} of all; "
            f"the least share is {LEAST_SHARE}"
            for number, entry in enumerate(mixture, 1)
            if entry["weight"] / total < LEAST_SHARE
        ]
    for problem in problems:
        yield key, problem
    if mixture and c.data.path:
        remedy = "put the path into an entry, or empty one of the two keys"
        yield key, f"data.path has no effect next to it; {remedy}"


def _entry_problems(entry: Mapping[str, object]) -> Iterator[str]:
    for name in entry:
        if name not in _MIXTURE_FIELDS:
            legal = f"{', '.join(_MIXTURE_FIELDS)}{nearest(name, _MIXTURE_FIELDS)}"
            yield f" has no {name!r}, only {legal}"
    source, weight, sources = entry.get("source"), entry.get("weight"), [*SOURCES]
    if source not in sources:
        legal = f"{', '.join(sources)}{nearest(str(source), sources)}"
        yield f": source {source!r} is not one of {legal}"
    if entry.get("path") and _reads_no_path(source):
        yield f": source {source} reads no path: {_propose_readers('source: ')}"
    if not isinstance(entry.get("path", ""), str):
        yield ": the path is a number; quote it if that is its name"
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
        yield f" needs a finite weight above 0; got {weight!r}"


def _reads_no_path(source: object) -> bool:
    return isinstance(source, str) and source in SOURCES and not SOURCES[source].needs_path


def _propose_readers(prefix: str) -> str:
    readers = [name for name, facts in SOURCES.items() if facts.needs_path and name != "text"]
    return f"set {prefix}text (or {', '.join(readers)}), or leave the path out"


@check
def check_data_path(c: Config) -> Wrong:
    """Refuse a path for a source that reads none."""
    source, mixture = c.data.source, c.data.mixture
    if not _reads_no_path(source):
        return
    remedy = _propose_readers("data.source=")
    if c.data.eval_path:
        reason = "of a mixture, too" if mixture else "as well"
        message = f"data.source={source} reads no path, and reads the validation set {reason}"
        yield "data.eval_path", f"{message}: {remedy}"
    if c.data.path and not mixture:
        yield "data.path", f"data.source={source} reads no path: {remedy}"


@check
def check_chat_template(c: Config) -> Wrong:
    """Check that conversations have a template, and that one is given for conversations only."""
    read, value = c.data.sources, c.data.chat_template
    chats = [source for source in read if source in SOURCES and SOURCES[source].is_chat]
    for key, given in (("data.chat_template", value), ("data.chat_date", c.data.chat_date)):
        if given and not chats:
            names = ", ".join(name for name, facts in SOURCES.items() if facts.is_chat)
            message = f"is for conversations, which data.source={read[0]} has not; these do: "
            yield key, message + names
    if chats and not value and c.data.tokenizer in TOKENIZERS:
        yield (
            "data.chat_template",
            f"data.tokenizer={c.data.tokenizer} has no chat template of its own: set "
            f"data.chat_template={CHATML}, or give a file with a Jinja template",
        )
    if value not in ("", CHATML) and not os.path.exists(value):
        message = f"{value!r} is neither {CHATML} nor a file{nearest(value, [CHATML])}"
        yield "data.chat_template", message


@check
def check_column(c: Config) -> Wrong:
    """Refuse a column for sources that have none to choose."""
    read = [*c.data.sources, *[c.data.source] * bool(c.data.eval_path)]
    able = [name for name, facts in SOURCES.items() if facts.has_column]
    if c.data.column and not {*read} & {*able}:
        message = f"data.source={read[0]} reads no column of this name, only {', '.join(able)} do"
        yield "data.column", message


@derive("data.tokenizer")
def derive_tokenizer(c: Config) -> Derived:
    """Draw random ids from the model's vocabulary where it is smaller than the tokenizer's.

    Otherwise ids are drawn from the tokenizer's, so that a run always draws the same ones.
    """
    num_ids, name = c.model.num_token_ids, c.data.tokenizer
    if num_plain_ids(name) > num_ids:
        remedy = f"use {PLAIN_IDS}{num_ids}"
        message = f"{name} has ids that model.vocab_size={num_ids} has not; {remedy}"
        yield "data.tokenizer", message
    is_smaller = name in TOKENIZERS and num_ids < TOKENIZERS[name].vocab_size
    is_text = c.data.eval_path or any(SOURCES[s].needs_tokenizer for s in c.data.sources)
    return {"data.tokenizer": f"{PLAIN_IDS}{num_ids}"} if is_smaller and not is_text else {}


@check
def check_resume(c: Config) -> Wrong:
    """Check that `checkpoint.resume` is a word that it knows or a step."""
    value, words = c.checkpoint.resume, ["auto", "never", "must"]
    if value not in words and not (value.isascii() and value.isdigit()):
        legal = f"auto, never, must or the number of a step{nearest(value, words)}"
        yield "checkpoint.resume", f"{value!r} is not one of {legal}"


@check
def check_mirror(c: Config) -> Wrong:
    """Check that the mirror is a URL of an object store, and no pattern."""
    url = c.checkpoint.mirror
    if url and not re.fullmatch(r"(s3|gs)://[^/]+(/.*)?", url):
        example = "such as s3://bucket/runs or gs://bucket/runs"
        yield "checkpoint.mirror", f"{url!r} is not a place in an object store, {example}"
    elif re.search(r"[*?[]", url):
        yield (
            "checkpoint.mirror",
            f"{url!r} holds *, ? or [, which libraries of object stores take for a pattern, so "
            "that steps of other runs could be deleted; give a place without them",
        )


@check
def check_kept_steps(c: Config) -> Wrong:
    """Check that there are steps to keep for good, and steps both saved and evaluated."""
    saved, evaluated, keep_every = c.checkpoint.every, c.eval.every, c.checkpoint.keep_every
    if keep_every and (not saved or keep_every % saved):
        legal = (
            f"a multiple of checkpoint.every={saved}" if saved else "0, since checkpoint.every=0"
        )
        message = f"expected {legal}: only saved steps can be kept; got {keep_every}"
        yield "checkpoint.keep_every", message
    if not c.checkpoint.keep_best:
        return
    intervals = {"eval.every": evaluated, "checkpoint.every": saved}
    if missing := [key for key, interval in intervals.items() if not interval]:
        remedy = f"give {' and '.join(missing)}, which is 0, or keep_best=0"
        message = f"the best checkpoints have the lowest evaluation loss: {remedy}"
        yield "checkpoint.keep_best", message
    elif saved % evaluated and evaluated % saved:
        yield (
            "checkpoint.keep_best",
            f"checkpoint.every={saved} and eval.every={evaluated} seldom fall on the same step, "
            "and only a saved step that is evaluated can be among the best: make one of them a "
            "multiple of the other",
        )


@check
def check_elastic(c: Config) -> Wrong:
    """Check that elastic axes split the batch, and that a run can go on with fewer hosts."""
    axes, key = c.mesh.elastic.axes, "mesh.elastic.axes"
    for axis in axes:
        if axis not in _SHRINKABLE:
            legal = f"{', '.join(_SHRINKABLE)}{nearest(axis, _SHRINKABLE)}"
            reason = "a model has no place on fewer devices of another axis"
            yield key, f"{axis!r} is not one of {legal}: {reason}"
    if len({*axes}) < len(axes):
        yield key, f"names an axis twice: {', '.join(axes)}"
    if axes and not (c.checkpoint.every or c.checkpoint.every_minutes):
        remedy = "give checkpoint.every"
        yield key, f"without checkpoints the run cannot go on with fewer hosts: {remedy}"
    if axes and c.compile.load:
        reason = "compile.load names a step for all hosts, with which fewer cannot go on"
        yield key, f"{reason}: leave out one of the two keys"


@check
def check_spike_window(c: Config) -> Wrong:
    """Check that a standard deviation of the window means something."""
    if 0 < (window := c.optimizer.spike_window) < LEAST_SPIKE_WINDOW:
        message = f"a deviation needs at least {LEAST_SPIKE_WINDOW} steps, or 0 = never"
        yield "optimizer.spike_window", f"{message}; got {window}"


@derive("optimizer.decay_steps", "optimizer.warmup_steps")
def derive_learning_rate_steps(c: Config) -> Derived:
    """Derive the steps of decay and warm-up from the steps of the run, once these are known."""
    if c.epochs:
        return {}
    decay, warmup = c.optimizer.decay_steps, c.optimizer.warmup_steps
    decay = c.steps if decay == -1 else decay
    warmup = decay // 20 if warmup == -1 else warmup
    if warmup > decay:
        remedy = "give at most that, or -1 for a twentieth"
        message = f"{warmup} is more than optimizer.decay_steps={decay}; {remedy}"
        yield "optimizer.warmup_steps", message
    return {"optimizer.decay_steps": decay, "optimizer.warmup_steps": warmup}


@check
def check_telemetry(c: Config) -> Wrong:
    """Check that the steps to profile are a range within the run; refuse idle trackers."""
    for key in ("wandb", "mlflow"):
        if getattr(c.telemetry, key) and not c.telemetry.log_every:
            reason = "gets every telemetry.log_every-th step, which is 0"
            yield f"telemetry.{key}", f"{reason}: give a number, or leave this empty"
    steps = c.telemetry.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= c.steps):
        legal = f"[] or [first, last] with 1 <= first <= last <= steps={c.steps}"
        yield "telemetry.profile_steps", f"expected {legal}; got {steps}"


@derive("compile.topology")
def check_topology(c: Config) -> Derived:
    """Turn `compile.topology` into libtpu's name, and check that slices are of a TPU."""
    name, slices = c.compile.topology, c.compile.num_slices
    if slices > 1 and name in ("", "cpu"):
        remedy = "give compile.topology, such as v5p:4x4x4"
        yield "compile.num_slices", f"{slices} slices need a TPU topology: {remedy}"
    if name in ("", "cpu"):
        return {}
    try:
        return {"compile.topology": canonical_topology(name)}
    except ValueError as error:
        yield "compile.topology", str(error)
        return {}


def check_trains(c: Config) -> None:
    """Refuse what is for the compile command only; not a rule, since that command takes it.

    Raises:
      ConfigError: an executable is to be stored.
    """
    if c.compile.save:
        remedy = "give it to python -m maxpipe.compile, and compile.load=FILE here"
        raise ConfigError(Problem("compile.save", f"training stores no executable; {remedy}"))


RUN_RULES = rules_in(globals())
