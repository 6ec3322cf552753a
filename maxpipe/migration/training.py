"""Translate the optimizer, its learning rate, checkpoints, traces and the run's directory."""

import os
import re

from maxpipe.config.model_places import MAXTEXT
from maxpipe.migration.translator import Translator


def translate_optimizer(t: Translator) -> None:
    name = t.text("opt_type")
    if name not in ("adamw", "muon", "sgd"):
        t.refuse("opt_type", f"{name} has no counterpart; use adamw, muon or sgd")
        return
    t.copy("opt_type", "learning_rate", "learning_rate_final_fraction")
    t.copy("gradient_clipping_threshold")
    if name == "sgd":
        t.set("optimizer.beta1", 0, "opt_type")
        t.set("optimizer.weight_decay", 0, "opt_type")
    else:
        t.copy("adam_b1", "adam_b2", "adam_eps")
        decay = "muon_weight_decay" if name == "muon" else "adam_weight_decay"
        t.copy(decay)
        if t.number(decay):
            t.note(decay, "decays matrices only; MaxText decays norms as well")
    if name == "muon":
        for key, value in (("muon_beta", 0.95), ("muon_consistent_rms", 0.2)):
            if t.number(key) != value:
                t.refuse(key, f"must be {value}, which is what muon has here")
    _translate_schedule(t)
    if t.is_on("skip_step_on_spikes"):
        t.copy("skip_step_interval", "skip_step_scaling_factor")
    if not t.is_on("abort_on_nan_loss") and not t.is_on("abort_on_inf_loss"):
        t.set("optimizer.max_consecutive_skips", 0, "abort_on_nan_loss", "abort_on_inf_loss")


def _translate_schedule(t: Translator) -> None:
    decay_steps, steps = t.integer("learning_rate_schedule_steps", -1), t.integer("steps", -1)
    if decay_steps == -1:
        decay_steps = steps
    if steps == -1:
        steps = decay_steps
    t.set("steps", steps, "steps")
    t.set("optimizer.decay_steps", decay_steps, "learning_rate_schedule_steps")
    if steps > decay_steps:
        t.note("learning_rate_schedule_steps", "then the last rate stays, where MaxText has 0")
    warmup = int(decay_steps * t.number("warmup_steps_fraction"))
    t.set("optimizer.warmup_steps", warmup, "warmup_steps_fraction")
    kind = t.text("lr_schedule_type")
    if kind not in ("cosine", "wsd"):
        t.refuse("lr_schedule_type", f"{kind} is not cosine or wsd")
        return
    t.copy("lr_schedule_type")
    if kind == "wsd":
        decay = int(decay_steps * t.number("wsd_decay_steps_fraction"))
        stable = 1 - decay / max(1, decay_steps - warmup)
        t.set("optimizer.stable_fraction", round(stable, 9), "wsd_decay_steps_fraction")


def translate_run(t: Translator) -> None:
    name = t.text("run_name") or t.text("model_name").replace("default", "maxtext")
    ours = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    t.set("run_name", ours, "run_name")
    if ours != name:
        t.note("run_name", f"the run is called {ours}: names have letters, digits, . _ and -")
    directory = t.text("base_output_directory")
    if "://" in directory:
        t.set("checkpoint.mirror", directory.rstrip("/"), "base_output_directory")
        message = "the run's directory is local, output_dir, and its checkpoints are copied there"
        t.note("base_output_directory", message)
    elif directory:
        t.set("output_dir", directory, "base_output_directory")
    _translate_checkpoints(t)
    if path := t.text("load_parameters_path"):
        t.set("init_from", f"{MAXTEXT}{path}", "load_parameters_path")
    t.copy("log_period")
    profiler, steps = t.text("profiler"), t.integer("steps", -1)
    if profiler == "xplane":
        first = t.integer("skip_first_n_steps_for_profiler") + 1
        last = min(first + t.integer("profiler_steps") - 1, steps) if steps > 0 else first
        t.set("telemetry.profile_steps", [first, last], "profiler", "profiler_steps")
    elif profiler:
        t.note("profiler", "left out: telemetry.profile_steps writes traces of JAX's profiler")
    cache = t.text("jax_cache_dir")
    if "://" in cache:
        t.note("jax_cache_dir", "left out: the compilation cache is a directory, not a URL")
    elif cache != "~/jax_cache":
        t.set("compile.cache_dir", os.path.expanduser(cache) or "off", "jax_cache_dir")


def _translate_checkpoints(t: Translator) -> None:
    every = t.integer("checkpoint_period") if t.is_on("enable_checkpointing") else 0
    t.set("checkpoint.every", every, "enable_checkpointing", "checkpoint_period")
    if not every:
        return
    if t.value("max_num_checkpoints_to_keep") is None:
        t.set("checkpoint.keep_every", every, "max_num_checkpoints_to_keep")
    else:
        t.copy("max_num_checkpoints_to_keep")
