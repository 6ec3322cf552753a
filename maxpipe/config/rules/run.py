"""Check the run: where it starts from, data, checkpoints, learning rate and telemetry."""

import math
import os
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

LEAST_SPIKE_WINDOW = 16
LEAST_SHARE = 0.001  # least share of a source in a mixture
_MIXTURE_FIELDS = ("source", "path", "weight")


@check
def check_init_from(c: Config) -> Wrong:
    """Check the form of `init_from`."""
    scheme, place = split_scheme(c.init_from)
    if scheme in (MAXTEXT, RUN):
        is_legal = bool(place) and not is_url(place)
    elif scheme == SCHEME:
        is_legal = bool(place) and not place.startswith("//")
    else:
        is_legal = not place or is_url(place)
    if not is_legal:
        yield (
            "init_from",
            f"{c.init_from!r} has none of the forms run:DIR (another run), hf:DIR (a folder with "
            "config.json and *.safetensors), hf:org/name (a model of the hub), s3://... or "
            "gs://... (a folder as of hf:DIR), maxtext:DIR (a step of MaxText), where runs and "
            "steps are in a directory of this machine",
        )


@check
def check_tokenizer(c: Config) -> Wrong:
    """Check that the tokenizer is in the catalogue, a path, or the file of a folder."""
    name, key, file = c.data.tokenizer, "data.tokenizer", tokenizer_path(c.data.tokenizer)
    is_path = "/" in name or name.endswith((".json", ".model")) or os.path.exists(name)
    if name.startswith(SCHEME):
        if not tokenizer_folder(name) and not os.path.isfile(file):
            remedy = f"give hf:DIR with a folder that has a {TOKENIZER}, as of save_pretrained"
            pieces = os.path.join(folder_of(name), "tokenizer.model")
            if os.path.isfile(pieces):
                remedy = f"{key}={pieces} takes the SentencePiece model that is there"
            yield key, f"there is no {file}; {remedy}"
    elif name.startswith(PLAIN_IDS):
        if not num_plain_ids(name):
            form = f"{PLAIN_IDS}N, with a number of ids of at least {LEAST_PLAIN_IDS}"
            yield key, f"{name!r} is not of the form {form}"
    elif name not in TOKENIZERS and not is_path:
        yield (
            key,
            f"{name!r} is neither {', '.join(TOKENIZERS)} nor the path of a tokenizer.json or "
            f".model, nor hf:DIR, nor {PLAIN_IDS}N{nearest(name, [*TOKENIZERS])}",
        )


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
        shares = [entry["weight"] / total for entry in mixture]
        if shares and min(shares) < LEAST_SHARE:
            problems.append(f"a weight is {min(shares):.2g} of all; the least is {LEAST_SHARE}")
    for problem in problems:
        yield key, problem
    if mixture and c.data.path:
        remedy = "put the path into an entry, or empty one of the two keys"
        yield key, f"data.path has no effect next to it; {remedy}"


def _entry_problems(entry: Mapping[str, object]) -> Iterator[str]:
    source, path, weight = str(entry.get("source")), entry.get("path", ""), entry.get("weight")
    if unknown := [name for name in entry if name not in _MIXTURE_FIELDS]:
        yield f" has no {unknown[0]!r}, only {', '.join(_MIXTURE_FIELDS)}"
    if source not in SOURCES:
        legal = f"{', '.join(SOURCES)}{nearest(source, [*SOURCES])}"
        yield f": source {source!r} is not one of {legal}"
    elif path and not SOURCES[source].needs_path:
        yield f": source {source} reads no path: set source: text, or leave the path out"
    if not isinstance(path, str):
        yield ": the path is a number; quote it if that is its name"
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
        yield f" needs a finite weight above 0; got {weight!r}"


@check
def check_chat_template(c: Config) -> Wrong:
    """Check that conversations have a template."""
    value, key = c.data.chat_template, "data.chat_template"
    has_chats = any(name in SOURCES and SOURCES[name].is_chat for name in c.data.sources)
    if has_chats and not value and c.data.tokenizer in TOKENIZERS:
        yield (
            key,
            f"data.tokenizer={c.data.tokenizer} has no chat template of its own: set "
            f"{key}={CHATML}, or give a file with a Jinja template",
        )
    if value not in ("", CHATML) and not os.path.exists(value):
        yield key, f"{value!r} is neither {CHATML} nor a file{nearest(value, [CHATML])}"


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
def check_epochs(c: Config) -> Wrong:
    """Refuse epochs of documents that have none."""
    if c.epochs and c.data.mixture:
        yield "epochs", "the sources of data.mixture pass at different speeds: give steps instead"
    elif c.epochs and not SOURCES[c.data.source].needs_tokenizer:
        message = f"data.source={c.data.source} draws documents without end: give steps instead"
        yield "epochs", message


@check
def check_kept_steps(c: Config) -> Wrong:
    """Check that steps to keep are saved, and the best of them evaluated."""
    saved, evaluated, keep_every = c.checkpoint.every, c.eval.every, c.checkpoint.keep_every
    if saved and keep_every % saved:
        message = f"must be a multiple of checkpoint.every={saved}; got {keep_every}"
        yield "checkpoint.keep_every", message
    if c.checkpoint.keep_best and saved and evaluated and saved % evaluated and evaluated % saved:
        yield (
            "checkpoint.keep_best",
            f"checkpoint.every={saved} and eval.every={evaluated} seldom fall on the same step, "
            "and only a saved step that is evaluated can be among the best: make one of them a "
            "multiple of the other",
        )


@check
def check_elastic(c: Config) -> Wrong:
    """Check that a run can go on with fewer hosts."""
    if c.mesh.elastic.axes and c.compile.load:
        reason = "compile.load names a step for all hosts, with which fewer cannot go on"
        yield "mesh.elastic.axes", f"{reason}: leave out one of the two keys"


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
def check_profile_steps(c: Config) -> Wrong:
    """Check that the steps to profile are a range within the run."""
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
