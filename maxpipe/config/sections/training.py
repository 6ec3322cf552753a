"""`optimizer.*`, `checkpoint.*`, `telemetry.*`, `compile.*`."""

from dataclasses import dataclass

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS
from maxpipe.config.sections.fields import option


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = option("adamw", "optimizer", variants=OPTIMIZERS)
    learning_rate: float = option(3e-4, "peak learning rate", above=0)
    schedule: str = option("cosine", "shape of the learning rate over steps", variants=LR_SCHEDULES)
    warmup_steps: int = option(
        -1,
        "steps of linear warm-up from 0; -1 = a twentieth of decay_steps",
        minimum=0,
        derived=True,
    )
    decay_steps: int = option(
        -1, "step at which the decay ends; -1 = steps", minimum=1, derived=True
    )
    stable_fraction: float = option(
        0.8, "wsd: share of the steps after warm-up that keep the peak rate", minimum=0, maximum=1
    )
    final_fraction: float = option(
        0.1, "learning rate at the end of the decay, as a share of the peak", minimum=0, maximum=1
    )
    beta1: float = option(
        0.9, "decay of the first moment; momentum for sgd and lion", minimum=0, maximum=0.9999
    )
    beta2: float = option(0.95, "decay of the second moment", minimum=0, maximum=0.999999)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay, on matrices only", minimum=0)
    grad_clip_norm: float = option(1.0, "clip gradients to this global norm; 0 = never", minimum=0)
    max_consecutive_skips: int = option(
        5, "stop with exit code 42 after so many non-finite steps in a row; 0 = never", minimum=0
    )
    spike_window: int = option(
        0,
        "skip steps whose loss or gradient norm lies far above those of so many steps; 0 = never",
        minimum=0,
    )
    spike_deviations: float = option(
        6.0, "how far above their mean a spike lies, in standard deviations", above=0
    )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(100, "save after every so many steps; 0 = never", minimum=0)
    every_minutes: float = option(
        0, "save as well when the last save is so long ago; 0 = never", minimum=0
    )
    grace_seconds: float = option(
        30,
        "time that a preempted run is given to save; a slower save is warned of, 0 = never",
        minimum=0,
    )
    keep: int = option(3, "newest checkpoints kept", minimum=1)
    keep_every: int = option(
        0, "keep for good every checkpoint whose step is a multiple of this; 0 = none", minimum=0
    )
    keep_best: int = option(
        0, "keep so many checkpoints of the lowest evaluation loss as well", minimum=0
    )
    mirror: str = option(
        "",
        "s3://bucket/path or gs://bucket/path that gets a copy of every checkpoint; a run that has lost its directory "
        "goes on from there; empty = none",
    )
    resume: str = option("auto", "auto, never, must, or the number of the step to continue from")
    convert_dtype: bool = option(
        False,
        "continue with parameters or optimizer state of another floating dtype than was saved",
    )


@dataclass(frozen=True)
class TelemetryConfig:
    log_every: int = option(
        10, "console and TensorBoard lines every so many steps; 0 = never", minimum=0
    )
    batch_digest: bool = option(
        False, "write a digest of every batch to metrics.jsonl, to compare runs by"
    )
    startup_deadline_seconds: float = option(
        3600,
        "end with exit code 124 if the first step is not finished after so long; 0 = never",
        minimum=0,
    )
    step_deadline_seconds: float = option(
        1800,
        "after the first step, end with exit code 124 if nothing is done for so long; 0 = never",
        minimum=0,
    )
    profile_steps: list[int] = option([], "[first, last]: write a profiler trace of these steps")  # noqa: RUF009


@dataclass(frozen=True)
class CompileConfig:
    cache_dir: str = option(
        "",
        "persistent compilation cache; off = none; empty = <output_dir>/compile_cache, off for several CPU devices",
    )
    topology: str = option(
        "",
        "what maxpipe.compile compiles for: a TPU slice such as v5p:4x4x4, or cpu for simulated devices",
    )
    num_slices: int = option(1, "slices of that topology, joined by DCN", minimum=1)
    save: str = option(
        "", "file in which maxpipe.compile stores the executable, for compile.load; empty = none"
    )
    load: str = option(
        "", "file of compile.save that maxpipe.train runs instead of compiling; empty = compile"
    )
