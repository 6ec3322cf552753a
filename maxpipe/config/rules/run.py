"""Check the run: where it starts from, data, checkpoints, learning rate and telemetry."""

import math
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise

from maxpipe.config.catalog import SOURCES, TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import (
    CHATML,
    LEAST_PLAIN_IDS,
    PLAIN_IDS,
    SCHEME,
    TOKENIZER,
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

_LEAST_SPIKE_WINDOW = 16  # steps that give a meaningful standard deviation
LEAST_SHARE = 0.001  # least share of a source in a mixture
_MIXTURE_FIELDS = ("source", "path", "weight")


@check
def check_init_from(c: Config) -> Wrong:
    scheme, place = split_scheme(c.init_from)
    is_legal = not place or is_url(place)
    if scheme:
        is_there = bool(place) and not place.startswith("//")
        is_legal = is_there and (scheme == SCHEME or not is_url(place))
    if not is_legal:
        yield (
            "init_from",
            f"{c.init_from!r} has none of the forms run:DIR, hf:DIR, hf:org/name, s3://..., "
            "gs://... or maxtext:DIR, where runs and steps of MaxText are on this machine",
        )


@check
def check_tokenizer(c: Config) -> Wrong:
    """The tokenizer must be in the catalogue, a path, or the file of a folder."""
    name, key, file = c.data.tokenizer, "data.tokenizer", tokenizer_path(c.data.tokenizer)
    is_path = "/" in name or name.endswith((".json", ".model")) or os.path.exists(name)
    if name.startswith(SCHEME):
        if not tokenizer_folder(name) and not os.path.isfile(file):
            remedy = f"give a folder that has a {TOKENIZER}, or the path of a SentencePiece .model"
            yield key, f"there is no {file}; {remedy}"
    elif name.startswith(PLAIN_IDS):
        if not num_plain_ids(name):
            form = f"{PLAIN_IDS}N, with a number of ids of at least {LEAST_PLAIN_IDS}"
            yield key, f"{name!r} is not of the form {form}"
    elif name not in TOKENIZERS and not is_path:
        known = f"{', '.join(TOKENIZERS)}, {PLAIN_IDS}N, hf:DIR, nor the path of a {TOKENIZER}"
        yield key, f"{name!r} is not {known} or .model{nearest(name, [*TOKENIZERS])}"


@check
def check_mixture(c: Config) -> Wrong:
    mixture, changes, key = c.data.mixture, c.data.mixture_changes, "data.mixture"
    least = 0 if changes else math.ulp(0)  # an entry may join later
    problems = [
        f"entry {n}: {problem}" for n, e in enumerate(mixture, 1) for problem in _wrong(e, least)
    ]
    if mixture and not problems:
        for weights in ([entry["weight"] for entry in mixture], *(row[1:] for row in changes)):
            share = min(filter(None, weights), default=0) / (math.fsum(weights) or 1)
            if share < (LEAST_SHARE if c.data.mixture_by == "documents" else math.ulp(0)):
                problems.append(f"a weight is {share:.2g} of all; the least is {LEAST_SHARE}")
    for problem in problems:
        yield key, problem
    if mixture and c.data.path:
        yield key, "leaves data.path without effect; put the path into an entry"
    others = sorted({s for s in c.data.sources if s in SOURCES and not SOURCES[s].knows_lengths})
    if mixture and c.data.mixture_by == "tokens" and others:
        able = " and ".join(name for name, source in SOURCES.items() if source.knows_lengths)
        remedy = "python -m maxpipe.tokenize encode makes token_bin of texts"
        message = f"only {able} know how long documents are, not {', '.join(others)}; {remedy}"
        yield "data.mixture_by", message


@check
def check_mixture_changes(c: Config) -> Wrong:
    changes, entries = c.data.mixture_changes, len(c.data.mixture)
    steps = [0, *(row[0] for row in changes if len(row) == entries + 1 > 1)]
    if len(steps) <= len(changes) or any(b < a + 1 or b % 1 for a, b in pairwise(steps)):
        form = f"[[after step, weights of the {entries} entries of data.mixture], ...]"
        yield "data.mixture_changes", f"expected {form}, steps rising; got {changes}"


def _wrong(entry: Mapping[str, object], least: float) -> Iterator[str]:
    source, weight = str(entry.get("source")), entry.get("weight")
    if unknown := [name for name in entry if name not in _MIXTURE_FIELDS]:
        yield f"has no {unknown[0]!r}, only {', '.join(_MIXTURE_FIELDS)}"
    if source not in SOURCES:
        legal = f"{', '.join(SOURCES)}{nearest(source, [*SOURCES])}"
        yield f"source {source!r} is not one of {legal}"
    elif entry.get("path") and not SOURCES[source].needs_path:
        yield f"source {source} reads no path: set source: text, or leave the path out"
    if not isinstance(weight, int | float) or weight < least:
        yield f"needs a weight above 0; got {weight!r}"


@check
def check_chat_template(c: Config) -> Wrong:
    value, key = c.data.chat_template, "data.chat_template"
    has_chats = any(name in SOURCES and SOURCES[name].is_chat for name in c.data.sources)
    if has_chats and not value and c.data.tokenizer in TOKENIZERS:
        remedy = f"set {key}={CHATML}, or give a file with a Jinja template"
        yield key, f"data.tokenizer={c.data.tokenizer} has no chat template of its own: {remedy}"
    if value not in ("", CHATML) and not os.path.exists(value):
        yield key, f"{value!r} is neither {CHATML} nor a file{nearest(value, [CHATML])}"


@derive("data.tokenizer")
def derive_tokenizer(c: Config) -> Derived:
    """Draw random ids from the model's vocabulary where it is smaller than the tokenizer's.

    Otherwise ids are drawn from the tokenizer's, so that a run always draws the same ones.
    """
    num_ids, name = c.model.num_token_ids, c.data.tokenizer
    if num_plain_ids(name) > num_ids:
        yield "data.tokenizer", f"{name} is more than model.vocab_size; use {PLAIN_IDS}{num_ids}"
    is_smaller = name in TOKENIZERS and num_ids < TOKENIZERS[name].vocab_size
    is_text = c.data.eval_path or any(SOURCES[s].needs_tokenizer for s in c.data.sources)
    return {"data.tokenizer": f"{PLAIN_IDS}{num_ids}"} if is_smaller and not is_text else {}


@check
def check_epochs(c: Config) -> Wrong:
    if c.epochs and c.data.mixture:
        yield "epochs", "the sources of data.mixture pass at different speeds: give steps instead"
    elif c.epochs and not SOURCES[c.data.source].needs_tokenizer:
        yield "epochs", f"data.source={c.data.source} has no end: give steps instead"
    elif c.epochs and c.data.batch_ramp:
        yield "epochs", "data.batch_ramp goes by steps: give steps instead"


@check
def check_kept_steps(c: Config) -> Wrong:
    """Steps to keep must be saved, and the best of them evaluated."""
    saved, evaluated, keep_every = c.checkpoint.every, c.eval.every, c.checkpoint.keep_every
    if saved and keep_every % saved:
        message = f"must be a multiple of checkpoint.every={saved}; got {keep_every}"
        yield "checkpoint.keep_every", message
    if c.checkpoint.keep_best and saved and evaluated and saved % evaluated and evaluated % saved:
        both = f"checkpoint.every={saved} and eval.every={evaluated} seldom fall on the same step"
        yield "checkpoint.keep_best", f"{both}: make one of them a multiple of the other"


@check
def check_elastic(c: Config) -> Wrong:
    if c.mesh.elastic.axes and c.compile.load:
        yield "mesh.elastic.axes", "compile.load is for all hosts: leave out one of the two keys"


@check
def check_spike_window(c: Config) -> Wrong:
    if 0 < (window := c.optimizer.spike_window) < _LEAST_SPIKE_WINDOW:
        yield "optimizer.spike_window", f"must be 0 or at least {_LEAST_SPIKE_WINDOW}; got {window}"


@check
def check_moment_dtype(c: Config) -> Wrong:
    o = c.optimizer
    if o.moment_dtype != "float32" and o.name == "sgd" and not o.beta1:
        yield "optimizer.moment_dtype", "sgd with optimizer.beta1=0 keeps no moments; leave it out"


@derive("optimizer.decay_steps", "optimizer.warmup_steps")
def derive_learning_rate_steps(c: Config) -> Derived:
    """Derive the steps of decay and warm-up from the steps of the run, once these are known."""
    if c.epochs:
        return {}
    decay, warmup = c.optimizer.decay_steps, c.optimizer.warmup_steps
    decay = c.steps if decay == -1 else decay
    warmup = decay // 20 if warmup == -1 else warmup
    if warmup > decay:
        yield "optimizer.warmup_steps", f"{warmup} is more than optimizer.decay_steps={decay}"
    return {"optimizer.decay_steps": decay, "optimizer.warmup_steps": warmup}


@check
def check_profile_steps(c: Config) -> Wrong:
    steps = c.telemetry.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= c.steps):
        legal = f"[] or [first, last] with 1 <= first <= last <= steps={c.steps}"
        yield "telemetry.profile_steps", f"expected {legal}; got {steps}"


@derive("compile.topology")
def check_topology(c: Config) -> Derived:
    """Turn `compile.topology` into libtpu's name, and check that slices are of a TPU."""
    name, slices = c.compile.topology, c.compile.num_slices
    if slices > 1 and name in ("", "cpu"):
        yield "compile.num_slices", f"{slices} slices need a TPU as compile.topology"
    if name in ("", "cpu"):
        return {}
    try:
        return {"compile.topology": canonical_topology(name)}
    except ValueError as error:
        yield "compile.topology", str(error)
        return {}


def check_trains(c: Config) -> None:
    """Raise ConfigError for what the compile command alone takes, such as a place to store."""
    if c.compile.save:
        message = "training stores no executable; give it to maxpipe.compile"
        raise ConfigError(Problem("compile.save", message))


RUN_RULES = rules_in(globals())
