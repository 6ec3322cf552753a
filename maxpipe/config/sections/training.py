"""Configure training: data, optimizer, checkpoints, telemetry and compilation."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NotRequired, TypedDict

from maxpipe.config.catalog import LR_SCHEDULES, OPTIMIZERS, SOURCES
from maxpipe.config.sections.fields import amount, derived, directory, option


class MixtureEntry(TypedDict):
    """A source of `data.mixture`; its weight is a share of the documents, or of the tokens."""

    source: str
    path: NotRequired[str]
    weight: float


@dataclass(frozen=True)
class DataConfig:
    source: str = option("python_stdlib", "where documents come from", variants=SOURCES)
    path: str = option("", "files, directories or globs, with commas; s3://, gs://, hf:NAME")
    eval_path: str = option("", "path of a validation set; empty = hold out data.eval_fraction")
    stream: bool = option(
        False, "read parquet files where they are as training comes to them, without copies"
    )
    column: str = option("", "column of the documents; empty = text, tokens or messages")
    mixture: list[MixtureEntry] = option(
        [], "several sources in place of one: [{source, path, weight}, ...]"
    )
    mixture_by: str = option(
        "documents",
        "what weights of the mixture are shares of",
        choices=("documents", "tokens"),
        acts_with="data.mixture",
    )
    mixture_changes: list[list[int | float]] = option(
        [], "later weights of its entries: [[after step, weight, weight, ...], ...]"
    )
    cache_dir: str = directory("", "where remote and unpacked files lie; empty = ~/.cache/maxpipe")
    cache_limit: int = amount(0, "most bytes of these copies; 0 = nine tenths of the free space")
    tokenizer: str = option(
        "byte",
        "byte; a tokenizer.json or SentencePiece .model; hf:DIR, hf:org/name, s3://... or gs://... "
        "with a tokenizer.json; ids:N, ids without text; unset = the base model's",
    )
    chat_template: str = option("", "Jinja file for conversations, or chatml; empty = tokenizer's")
    chat_date: str = option("", "date that strftime_now writes: 2024-07-26; empty = the first day")
    global_batch_size: int = option(32, "sequences per step", minimum=1, maximum=2**24)
    batch_ramp: list[list[int]] = option(
        [], "smaller batches at first: [[0, sequences], ..., [after step, global_batch_size]]"
    )
    sequence_length: int = option(128, "tokens per sequence", minimum=1, maximum=2**24)
    packing: bool = option(True, "several documents in each sequence; false = pad one in each")
    shuffle: bool = option(True, "read documents in a new order in each epoch, derived from seed")
    eval_fraction: float = amount(0.02, "share of documents set aside for evaluation", maximum=0.5)
    on_bad_document: str = option(
        "stop", "end the run at a bad document, or skip it", choices=("stop", "skip")
    )
    num_workers: int = amount(0, "processes that prepare batches; 0 = a thread of the trainer")
    prefetch: int = option(4, "number of batches prepared ahead", minimum=1)

    @property
    def sources(self) -> list[str]:
        """Return the sources that training reads, in the order of `mixture` if there is one."""
        return [str(entry.get("source")) for entry in self.mixture] or [self.source]

    def weights_after(self, step: float) -> list[float]:
        """Return the weights of the mixture's entries that hold after `step` finished steps."""
        changes = [[0.0, *(entry["weight"] for entry in self.mixture)], *self.mixture_changes]
        return [weights for start, *weights in changes if start <= step][-1]

    def sequences(self, steps: int) -> int:
        """Return the sequences of the first `steps` steps."""
        rises = pairwise([[0, 0], *(self.batch_ramp or [[0, self.global_batch_size]])])
        return sum((b - a) * max(steps - start, 0) for (_, a), (start, b) in rises)


@dataclass(frozen=True)
class EvalConfig:
    every: int = amount(50, "evaluate every this many steps; 0 = never")
    batches: int = amount(
        2,
        "batches per evaluation; 0 or all = everything held out",
        zero="all",
        acts_with="eval.every",
    )
    batches_per_source: int = derived(
        "batches of each source of a mixture alone; -1 = an even share; 0 = none",
        minimum=0,
        acts_with="eval.every",
    )
    global_batch_size: int = derived("sequences per evaluation batch; -1 = data.global_batch_size")
    prompts: list[str] = option(
        [], "texts that the model continues at each evaluation", acts_with="eval.every"
    )


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = option("adamw", "optimizer", variants=OPTIMIZERS)
    learning_rate: float = amount(3e-4, "peak learning rate")
    schedule: str = option("cosine", "shape of the learning rate over steps", variants=LR_SCHEDULES)
    warmup_steps: int = derived(
        "steps of the linear rise; -1 = a twentieth of decay_steps", minimum=0
    )
    decay_steps: int = derived("step at which the decay ends; -1 = steps")
    stable_fraction: float = amount(0.8, "share of steps after warm-up at the peak", maximum=1)
    final_fraction: float = amount(0.1, "last learning rate as a share of the peak", maximum=1)
    beta1: float = amount(0.9, "decay of the first moment, or momentum", maximum=0.9999)
    beta2: float = amount(0.95, "decay of the second moment", maximum=0.999999)
    eps: float = option(1e-8, "number added to the root of the second moment", above=0)
    moment_dtype: str = option(
        "float32",
        "dtype in which moments are stored; bfloat16 is rounded stochastically",
        choices=("float32", "bfloat16"),
    )
    weight_decay: float = amount(0.1, "decoupled weight decay; applies to matrices only")
    grad_clip_norm: float = amount(1.0, "norm to which larger gradients are scaled; 0 = no bound")
    max_consecutive_skips: int = amount(5, "exit with 42 after so many non-finite steps; 0 = never")
    spike_window: int = amount(
        0, "skip steps whose loss or gradient is far above the mean of so many; 0 = never"
    )
    spike_deviations: float = option(
        6.0, "standard deviations that make a spike", above=0, acts_with="optimizer.spike_window"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = amount(100, "save every this many steps; 0 = never")
    every_minutes: float = amount(0, "also save when the last is so many minutes old; 0 = never")
    grace_seconds: float = amount(
        30, "seconds to save when preempted; slower saves warn; 0 = never"
    )
    replica_every: int = amount(
        0, "keep a copy in hosts' memory for maxpipe supervise every so many steps; 0 = never"
    )
    keep: int = option(
        3,
        "number of newest checkpoints to keep",
        minimum=1,
        acts_with="checkpoint.every or checkpoint.every_minutes",
    )
    keep_every: int = amount(0, "also keep multiples of this; 0 = none", needs="checkpoint.every")
    keep_best: int = amount(
        0,
        "number of checkpoints to keep as well, the best by eval loss",
        needs="checkpoint.every and eval.every",
    )
    mirror: str = option(
        "",
        "s3://bucket/path or gs://bucket/path that gets a copy of every checkpoint",
        pattern="((s3|gs)://[^/*?[]+(/[^*?[]*)?)?",
        form="a place such as s3://bucket/runs, without *, ? and [, which stores take as a pattern",
    )
    mirror_deadline_seconds: float = amount(
        300, "exit with 1 if the mirror is silent for so long; 0 = never"
    )
    resume: str = option(
        "auto",
        "auto, never, must, or the number of the step to resume from",
        pattern="auto|never|must|[0-9]+",
        form="one of auto, never, must or the number of a step",
    )
    convert_dtype: bool = option(False, "let a resume convert state to other floating dtypes")
    accept_changes: list[str] = option(
        [],
        "what may differ from the checkpoint; tokenizer also from the base model",
        choices=("model", "seed", "optimizer", "data", "tokenizer"),
    )


@dataclass(frozen=True)
class TelemetryConfig:
    log_every: int = amount(10, "write to console and TensorBoard every this many steps; 0 = never")
    required: bool = option(False, "exit with code 1 when metrics cannot be written; false = warn")
    wandb: str = option("", "[ENTITY/]PROJECT of Weights & Biases", needs="telemetry.log_every")
    mlflow: str = option("", "MLflow's experiment for the metrics", needs="telemetry.log_every")
    batch_digest: bool = option(False, "digests of batches in metrics.jsonl, to compare runs")
    startup_deadline_seconds: float = amount(
        3600, "exit with code 124 if the first step takes longer; 0 = never"
    )
    step_deadline_seconds: float = amount(
        1800, "exit with 124 if a later step takes so long; 0 = never"
    )
    profile_steps: list[int] = option([], "[first, last]: write a profiler trace of these steps")
    trace_steps: int = option(3, "steps of the profiler trace that SIGUSR2 asks for", minimum=1)
    metrics_port: int = amount(
        0, "port at which process 0 serves Prometheus' /metrics; 0 = none", maximum=65535
    )
    metrics_host: str = option(
        "127.0.0.1",
        "address of this port; 0.0.0.0 = reachable from other machines",
        pattern=r"\S+",
        form="a name or an address of the machine",
        acts_with="telemetry.metrics_port",
    )


@dataclass(frozen=True)
class CompileConfig:
    cache_dir: str = directory(
        "",
        "of the compilation cache, machine code that only people you trust may write; off = none; "
        "empty = <output_dir>/compile_cache, none on several simulated devices",
    )
    topology: str = option("", "for maxpipe.compile: a TPU slice such as v5p:4x4x4, or cpu")
    num_slices: int = option(1, "number of slices of that topology, joined by DCN", minimum=1)
    save: str = option("", "file in which maxpipe.compile stores the executable, for compile.load")
    load: str = option("", "file to run instead of compiling: machine code, so trust its origin")
