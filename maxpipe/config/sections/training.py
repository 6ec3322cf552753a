"""Configure training: data, optimizer, checkpoints, telemetry and compilation."""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS, SOURCES
from maxpipe.config.sections.fields import derived, directory, option


class MixtureEntry(TypedDict):
    """A source of `data.mixture`; its weight is a share of the documents."""

    source: str
    path: NotRequired[str]
    weight: float


@dataclass(frozen=True)
class DataConfig:
    """`data.*`."""

    source: str = option("python_stdlib", "where documents come from", variants=SOURCES)
    path: str = option(
        "", "file, directory or glob, here or at s3://, gs://, several with commas; or hf:NAME"
    )
    eval_path: str = option("", "of a separate validation set; empty = data.eval_fraction")
    column: str = option(
        "", "column with the documents (datasets); empty = text or tokens, for chats messages"
    )
    mixture: list[MixtureEntry] = option(
        [], "a list of {source, path, weight} in place of one source; weights share documents"
    )
    cache_dir: str = directory(
        "", "for copies of remote and unpacked files; empty = ~/.cache/maxpipe"
    )
    cache_limit: int = option(
        0, "most bytes of these copies, without `datasets`; 0 = 9/10 of free space each", minimum=0
    )
    tokenizer: str = option(
        "byte",
        "byte; a tokenizer.json or SentencePiece .model; hf:DIR, hf:org/name, s3://... or gs://... "
        "with a tokenizer.json; ids:N, ids without text; unset = the base model's",
    )
    chat_template: str = option(
        "", "Jinja template of conversations: a file, or chatml; empty = the tokenizer's own"
    )
    chat_date: str = option(
        "", "date that a template's strftime_now writes, as 2024-07-26; empty = the run's first day"
    )
    global_batch_size: int = option(
        32, "sequences per step over all devices", minimum=1, maximum=2**24
    )
    sequence_length: int = option(128, "tokens per sequence", minimum=1, maximum=2**24)
    packing: bool = option(
        True, "fill each sequence with several documents; false = pad one document per sequence"
    )
    shuffle: bool = option(True, "read documents in a new order in each epoch, derived from seed")
    eval_fraction: float = option(
        0.02, "share of the documents set aside for evaluation", minimum=0, maximum=0.5
    )
    on_bad_document: str = option(
        "stop", "end the run at a document that is no text, or skip it", choices=("stop", "skip")
    )
    num_workers: int = option(
        0, "processes that prepare batches; 0 = a thread of the training process", minimum=0
    )
    prefetch: int = option(4, "number of batches prepared ahead", minimum=1)

    @property
    def sources(self) -> list[str]:
        """Return the sources that training reads, in the order of `mixture` if there is one."""
        return [entry["source"] for entry in self.mixture] or [self.source]


@dataclass(frozen=True)
class EvalConfig:
    """`eval.*`."""

    every: int = option(50, "evaluate every this many steps; 0 = never", minimum=0)
    batches: int = option(
        2, "batches per evaluation; 0 or all = all", minimum=0, zero="all", acts_with="eval.every"
    )
    batches_per_source: int = derived(
        "batches of each source of a mixture; -1 = an even share", minimum=0, acts_with="eval.every"
    )
    global_batch_size: int = derived("sequences per evaluation batch; -1 = data.global_batch_size")
    prompts: list[str] = option(
        [], "texts to continue at each evaluation; runs of one process only", acts_with="eval.every"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """`optimizer.*`."""

    name: str = option("adamw", "optimizer", variants=OPTIMIZERS)
    learning_rate: float = option(3e-4, "peak learning rate", minimum=0)
    schedule: str = option("cosine", "shape of the learning rate over steps", variants=LR_SCHEDULES)
    warmup_steps: int = derived(
        "steps of a linear rise from 0; -1 = a twentieth of decay_steps", minimum=0
    )
    decay_steps: int = derived("step at which the decay ends; -1 = steps")
    stable_fraction: float = option(
        0.8, "share of the steps after warm-up at the peak learning rate", minimum=0, maximum=1
    )
    final_fraction: float = option(
        0.1, "learning rate at the end of the decay, as a share of the peak", minimum=0, maximum=1
    )
    beta1: float = option(0.9, "decay of the first moment; momentum", minimum=0, maximum=0.9999)
    beta2: float = option(0.95, "decay of the second moment", minimum=0, maximum=0.999999)
    eps: float = option(1e-8, "number added to the root of the second moment", above=0)
    weight_decay: float = option(0.1, "decoupled weight decay; applies to matrices only", minimum=0)
    grad_clip_norm: float = option(
        1.0, "global norm to which larger gradients are scaled down; 0 = no bound", minimum=0
    )
    max_consecutive_skips: int = option(
        5, "exit with code 42 after so many non-finite steps in a row; 0 = never", minimum=0
    )
    spike_window: int = option(
        0, "skip a step far above the mean loss or norm of this many; 0 = never", minimum=0
    )
    spike_deviations: float = option(
        6.0, "standard deviations that make a spike", above=0, acts_with="optimizer.spike_window"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """`checkpoint.*`."""

    every: int = option(100, "save every this many steps; 0 = never", minimum=0)
    every_minutes: float = option(
        0, "also save when the last save is this many minutes old; 0 = never", minimum=0
    )
    grace_seconds: float = option(
        30, "seconds that a preempted run has to save; slower saves warn; 0 = never", minimum=0
    )
    replica_every: int = option(
        0, "keep a replica in the host's memory every this many steps; 0 = never", minimum=0
    )
    keep: int = option(
        3,
        "number of newest checkpoints to keep",
        minimum=1,
        acts_with="checkpoint.every or checkpoint.every_minutes",
    )
    keep_every: int = option(
        0, "also keep steps that are a multiple; 0 = none", minimum=0, needs="checkpoint.every"
    )
    keep_best: int = option(
        0, "also keep this many by eval loss", minimum=0, needs="checkpoint.every and eval.every"
    )
    mirror: str = option(
        "",
        "s3://bucket/path or gs://bucket/path that gets a copy of every checkpoint",
        pattern="((s3|gs)://[^/*?[]+(/[^*?[]*)?)?",
        form="a place such as s3://bucket/runs, without *, ? and [, which stores take as a pattern",
    )
    mirror_deadline_seconds: float = option(
        300, "exit with code 1 when the mirror takes nothing for this long; 0 = never", minimum=0
    )
    resume: str = option(
        "auto",
        "auto, never, must, or the number of the step to resume from",
        pattern="auto|never|must|[0-9]+",
        form="one of auto, never, must or the number of a step",
    )
    convert_dtype: bool = option(
        False, "allow a resume to convert parameters or optimizer state to other floating dtypes"
    )
    accept_changes: list[str] = option(
        [],
        "what may differ from the checkpoint to resume from, tokenizer also from the base model's",
        choices=("model", "seed", "optimizer", "data", "tokenizer"),
    )


@dataclass(frozen=True)
class TelemetryConfig:
    """`telemetry.*`."""

    log_every: int = option(
        10, "write to the console and TensorBoard every this many steps; 0 = never", minimum=0
    )
    required: bool = option(
        False, "exit with code 1 when metrics, events or traces cannot be written; false = warn"
    )
    wandb: str = option(
        "", "[ENTITY/]PROJECT of Weights & Biases for the metrics", needs="telemetry.log_every"
    )
    mlflow: str = option(
        "", "experiment of MLflow, at MLFLOW_TRACKING_URI", needs="telemetry.log_every"
    )
    batch_digest: bool = option(
        False, "write a digest of every batch to metrics.jsonl, so that runs can be compared"
    )
    startup_deadline_seconds: float = option(
        3600, "exit with code 124 if the first step takes longer than this; 0 = never", minimum=0
    )
    step_deadline_seconds: float = option(
        1800, "later exit with code 124 if nothing progresses for this long; 0 = never", minimum=0
    )
    profile_steps: list[int] = option([], "[first, last]: write a profiler trace of these steps")


@dataclass(frozen=True)
class CompileConfig:
    """`compile.*`."""

    cache_dir: str = directory(
        "",
        "of the compilation cache, machine code that only people you trust may write; off = none; "
        "empty = <output_dir>/compile_cache, none on several simulated devices",
    )
    topology: str = option(
        "", "for maxpipe.compile: a TPU slice such as v5p:4x4x4, or cpu for simulated devices"
    )
    num_slices: int = option(1, "number of slices of that topology, joined by DCN", minimum=1)
    save: str = option("", "file in which maxpipe.compile stores the executable, for compile.load")
    load: str = option(
        "", "file of compile.save to run instead of compiling: machine code, so trust its origin"
    )
