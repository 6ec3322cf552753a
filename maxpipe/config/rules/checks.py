"""Rules across keys that derive nothing and need no device."""

import math
import os
import re

from maxpipe.config.catalog import SCHEDULES, SOURCES, TOKENIZERS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.nearest import divisors, multiples_around
from maxpipe.config.rules.rule import rule
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.values import nearest

LEAST_SPIKE_WINDOW = 16
LEAST_SHARE = 0.001  # of a mixture


@rule("run_name")
def run_name(c: Config) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", c.run_name):
        legal = "a name without a path: letters, digits, '.', '_' and '-', not starting with a sign"
        raise ConfigError(
            Problem("run_name", f"{c.run_name!r} is not {legal}; output_dir takes the directory")
        )


@rule("output_dir", "data.cache_dir")
def local_directories(c: Config) -> None:
    directories = {"output_dir": c.output_dir, "data.cache_dir": c.data.cache_dir}
    remote = [(key, path) for key, path in directories.items() if "://" in path]
    if remote:
        why = "is not a directory: renames must be atomic there, so give a local or shared file system, such as NFS"
        mirror = {
            "output_dir": "; checkpoint.mirror keeps a copy of every checkpoint in an object store"
        }
        raise ConfigError(
            *(Problem(key, f"{path!r} {why}{mirror.get(key, '')}") for key, path in remote)
        )


@rule("model.num_query_heads", "model.num_kv_heads")
def grouped_heads(c: Config) -> None:
    heads = c.model.num_query_heads
    if heads % c.model.num_kv_heads:
        legal = ", ".join(str(n) for n in divisors(heads))
        message = f"{c.model.num_kv_heads} does not divide model.num_query_heads={heads}; legal are {legal}"
        raise ConfigError(Problem("model.num_kv_heads", message))


@rule("model.rope_scaling")
def rope_scaling(c: Config) -> None:
    scaling = c.model.rope_scaling
    if scaling.factor != 1 and scaling.low_freq_factor >= scaling.high_freq_factor:
        message = (
            f"must be less than model.rope_scaling.high_freq_factor={scaling.high_freq_factor}"
        )
        raise ConfigError(
            Problem(
                "model.rope_scaling.low_freq_factor", f"{message}; got {scaling.low_freq_factor}"
            )
        )


@rule("data.tokenizer")
def tokenizer(c: Config) -> None:
    name, names = c.data.tokenizer, [*TOKENIZERS]
    is_path = "/" in name or name.endswith((".json", ".model")) or os.path.exists(name)
    if name not in names and not is_path:
        message = f"{name!r} is neither {', '.join(names)} nor the path of a tokenizer.json or .model{nearest(name, names)}"
        raise ConfigError(Problem("data.tokenizer", message))


@rule("data.source", "data.path", "data.mixture")
def path_without_reader(c: Config) -> None:
    source = c.data.source
    if c.data.path and not c.data.mixture and source in SOURCES and not SOURCES[source].needs_path:
        raise ConfigError(
            Problem("data.path", f"data.source={source} reads no path: {_reader('data.source=')}")
        )


def _reader(prefix: str) -> str:
    readers = [name for name, facts in SOURCES.items() if facts.needs_path]
    return f"set {prefix}text (or {', '.join(name for name in readers if name != 'text')}), or leave the path out"


@rule("data.mixture", "data.path")
def mixture(c: Config) -> None:
    key, problems = "data.mixture", []
    fields, sources = ("source", "path", "weight"), [*SOURCES]
    for number, entry in enumerate(c.data.mixture, 1):
        for name in [*entry.keys() - set(fields)]:
            problems.append(
                f"entry {number} has no {name!r}, only {', '.join(fields)}{nearest(name, [*fields])}"
            )
        if (source := entry.get("source")) not in sources:
            problems.append(
                f"entry {number}: source {source!r} is not one of {', '.join(sources)}{nearest(str(source), sources)}"
            )
        if entry.get("path") and source in SOURCES and not SOURCES[source].needs_path:
            problems.append(f"entry {number}: source {source} reads no path: {_reader('source: ')}")
        if not isinstance(entry.get("path", ""), str):
            problems.append(f"entry {number}: the path is a number; quote it if that is its name")
        weight = entry.get("weight")
        if isinstance(weight, str) or weight is None or weight <= 0:
            problems.append(f"entry {number} needs a weight above 0; got {weight!r}")
    problems = problems or _small_shares([entry["weight"] for entry in c.data.mixture])
    if c.data.mixture and c.data.path:
        problems.append(
            "data.path has no effect beside it; put the path into an entry, or empty one of the two keys"
        )
    if problems:
        raise ConfigError(*(Problem(key, problem) for problem in problems))


def _small_shares(weights: list[float]) -> list[str]:
    total = math.fsum(weights)
    return [
        f"entry {number}: weight {weight} is {weight / total:.2g} of all; the least share is {LEAST_SHARE}"
        for number, weight in enumerate(weights, 1)
        if weight / total < LEAST_SHARE
    ]


@rule("checkpoint.resume")
def resume(c: Config) -> None:
    value = c.checkpoint.resume
    words = ["auto", "never", "must"]
    if value not in words and not (value.isascii() and value.isdigit()):
        message = f"{value!r} is not one of auto, never, must or the number of a step{nearest(value, words)}"
        raise ConfigError(Problem("checkpoint.resume", message))


@rule("checkpoint.mirror")
def mirror(c: Config) -> None:
    url = c.checkpoint.mirror
    if url and not re.fullmatch(r"(s3|gs)://[^/]+(/.*)?", url):
        message = f"{url!r} is not a place in an object store, such as s3://bucket/runs or gs://bucket/runs"
        raise ConfigError(Problem("checkpoint.mirror", message))


@rule("checkpoint.every", "checkpoint.keep_every")
def keep_every(c: Config) -> None:
    every, kept = c.checkpoint.every, c.checkpoint.keep_every
    if kept and (not every or kept % every):
        legal = (
            f"a multiple of checkpoint.every={every}" if every else "0, since checkpoint.every=0"
        )
        message = f"expected {legal}: only steps that are saved can be kept; got {kept}"
        raise ConfigError(Problem("checkpoint.keep_every", message))


@rule("checkpoint.every", "checkpoint.keep_best", "eval.every")
def keep_best(c: Config) -> None:
    every, evaluated = c.checkpoint.every, c.eval.every
    if not c.checkpoint.keep_best:
        return
    for key, steps in (("eval.every", evaluated), ("checkpoint.every", every)):
        if not steps:
            message = f"the best are those of the lowest evaluation loss: give {key}, which is 0, or keep_best=0"
            raise ConfigError(Problem("checkpoint.keep_best", message))
    if every % evaluated and evaluated % every:
        message = (
            f"checkpoint.every={every} and eval.every={evaluated} seldom meet, and only a saved step that is evaluated "
            "can be among the best: make one of them a multiple of the other"
        )
        raise ConfigError(Problem("checkpoint.keep_best", message))


@rule("optimizer.spike_window")
def spike_window(c: Config) -> None:
    if 0 < c.optimizer.spike_window < LEAST_SPIKE_WINDOW:
        message = f"a deviation needs at least {LEAST_SPIKE_WINDOW} steps, or 0 = never; got {c.optimizer.spike_window}"
        raise ConfigError(Problem("optimizer.spike_window", message))


@rule("telemetry.profile_steps", "steps")
def profile_steps(c: Config) -> None:
    steps = c.telemetry.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1] <= c.steps):
        message = (
            f"expected [] or [first, last] with 1 <= first <= last <= steps={c.steps}; got {steps}"
        )
        raise ConfigError(Problem("telemetry.profile_steps", message))


@rule("sharding.logical_axis_rules")
def logical_axis_rules(c: Config) -> None:
    problems: list[str] = []
    seen: set[str] = set()
    for entry in c.sharding.logical_axis_rules:
        name, axes = (
            (entry[0], entry[1]) if isinstance(entry, list) and len(entry) == 2 else (None, None)
        )
        if (
            not isinstance(name, str)
            or not isinstance(axes, list)
            or not all(isinstance(a, str) for a in axes)
        ):
            problems.append(f"{entry} is not of the form [logical axis, [mesh axes]]")
            continue
        unknown = [axis for axis in axes if axis not in MESH_AXES]
        for axis in unknown:
            legal = f"the mesh axes are {', '.join(MESH_AXES)}"
            problems.append(
                f"{entry}: there is no mesh axis {axis!r}{nearest(axis, list(MESH_AXES))}; {legal}"
            )
        if len(set(axes)) < len(axes):
            problems.append(
                f"{entry} uses a mesh axis twice, but an array can be split over it once only"
            )
        if name in seen:
            problems.append(f"{name!r} has more than one rule; merge their mesh axes into one list")
        seen.add(name)
    if problems:
        raise ConfigError(
            *(Problem("sharding.logical_axis_rules", message) for message in problems)
        )


@rule()
def unsupported_axes(c: Config) -> None:
    reason = "the axis splits the experts of a mixture, and no decoder block has any yet"
    problems = [
        Problem(f"mesh.{level}.expert", f"must be 1: {reason}")
        for level, sizes in (("ici", c.mesh.ici), ("dcn", c.mesh.dcn))
        if sizes.expert != 1
    ]
    if problems:
        raise ConfigError(*problems)


@rule("mesh.ici.context", "mesh.dcn.context", "data.sequence_length")
def context_chunks(c: Config) -> None:
    """Every device along the axis has two chunks of a sequence."""
    length, context = c.data.sequence_length, c.mesh.size("context")
    if context > 1 and length % (2 * context):
        near = multiples_around(length, 2 * context)
        message = f"{length} is not divisible by 2 x mesh.*.context = {2 * context}; nearest legal: {near}"
        raise ConfigError(Problem("data.sequence_length", message))


@rule("mesh.ici.context", "mesh.dcn.context", "sharding.logical_axis_rules")
def context_rule(c: Config) -> None:
    """What is gathered and summed over the axis is that of parts of a sequence."""
    given = dict(c.sharding.logical_axis_rules).get("activation_length", [])
    if c.mesh.size("context") > 1 and given != ["context"]:
        message = f"mesh.*.context splits sequences over the axis, but activation_length lies over {given}"
        raise ConfigError(
            Problem("sharding.logical_axis_rules", f"{message}; use [activation_length, [context]]")
        )


@rule("pipeline.schedule")
def schedule(c: Config) -> None:
    name = c.pipeline.schedule
    if name.endswith(".csv"):
        if not os.path.isfile(name):
            raise ConfigError(Problem("pipeline.schedule", f"there is no file {name}"))
        return
    names = [*SCHEDULES]
    if name not in names:
        message = (
            f"{name!r} is neither a CSV file nor one of {', '.join(names)}{nearest(name, names)}"
        )
        raise ConfigError(Problem("pipeline.schedule", message))


@rule("compile.topology", "compile.num_slices")
def topology(c: Config) -> None:
    name, slices = c.compile.topology, c.compile.num_slices
    if name and name != "cpu" and not re.fullmatch(r"v\d+[a-z]*:\d+x\d+(x\d+)?", name):
        message = f"{name!r} is neither cpu nor a chip and its grid, such as v5e:4x4, v5p:4x4x4 or v6e:8x8"
        raise ConfigError(Problem("compile.topology", message))
    if slices > 1 and name in ("", "cpu"):
        message = f"{slices} slices need a TPU topology: give compile.topology, such as v5p:4x4x4"
        raise ConfigError(Problem("compile.num_slices", message))


CHECKS = (
    run_name,
    local_directories,
    grouped_heads,
    rope_scaling,
    tokenizer,
    path_without_reader,
    mixture,
    resume,
    mirror,
    keep_every,
    keep_best,
    spike_window,
    profile_steps,
    logical_axis_rules,
    unsupported_axes,
    context_chunks,
    context_rule,
    schedule,
    topology,
)
