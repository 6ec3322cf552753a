"""Hold the facts about every variant that a configuration key can name; data only.

A variant is one entry here and one function or class, which `implementation` names as
"module:attribute"; it is imported when a run uses it. Facts about engines are in `engine_facts`,
those about models in `model_facts`.
Errors, checks, `--help`, the documentation and the tests read these tables, so a fact stands
nowhere else. Another package adds a variant by an entry in a module that `--import MODULE`, or an
entry point of the group `maxpipe.variants`, imports before the configuration is read:

    from maxpipe.config import catalog
    catalog.OPTIMIZERS["mine"] = catalog.Optimizer("my_package.optimizers:mine", moments=1)
"""

from dataclasses import dataclass

from maxpipe.config.engine_facts import ENGINES as ENGINES
from maxpipe.config.engine_facts import Engine as Engine
from maxpipe.config.engine_facts import Refusal as Refusal
from maxpipe.config.model_facts import BLOCKS as BLOCKS
from maxpipe.config.model_facts import DISPATCHES as DISPATCHES
from maxpipe.config.model_facts import GROUPED_KERNELS as GROUPED_KERNELS
from maxpipe.config.model_facts import KERNELS as KERNELS
from maxpipe.config.model_facts import MODEL_PLACES as MODEL_PLACES
from maxpipe.config.model_facts import MODEL_TYPES as MODEL_TYPES
from maxpipe.config.model_facts import ROUTERS as ROUTERS
from maxpipe.config.model_facts import WEIGHT_FORMATS as WEIGHT_FORMATS
from maxpipe.config.model_facts import AttentionKernel as AttentionKernel
from maxpipe.config.model_facts import Block as Block
from maxpipe.config.model_facts import Dispatch as Dispatch
from maxpipe.config.model_facts import GroupedKernel as GroupedKernel
from maxpipe.config.model_facts import ModelPlace as ModelPlace
from maxpipe.config.model_facts import ModelType as ModelType
from maxpipe.config.model_facts import Router as Router
from maxpipe.config.model_facts import Variant
from maxpipe.config.model_facts import WeightFormat as WeightFormat


@dataclass(frozen=True, kw_only=True)
class Schedule(Variant):
    """A schedule, `pipeline.schedule`: a function (num_stages, num_microbatches) -> `Table`.

    Attributes:
      engines: engines that run it; `pipeline.engine=auto` picks the first.
      repeats: chunks per stage, `pipeline.num_repeats`; None if any number is legal; the function
        then takes it as `num_repeats`.
      delays: whether `pipeline.delay_activation_forwarding` applies; the function then takes
        `forwarding_delay`.
      overlaps: whether `pipeline.overlap_slots` applies; the function then takes `slack`.
      splits_backward: whether the table has units for input and weight gradients.
      timed: whether the order may follow the times of units, `pipeline.unit_times`; the function
        then takes `times`.
    """

    engines: tuple[str, ...]
    repeats: int | None = 1
    delays: bool = False
    overlaps: bool = False
    splits_backward: bool = False
    timed: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the keys of `pipeline.*` that have no effect."""
        return () if self.timed else ("unit_times",)

    def repeats_for(self, num_repeats: int) -> int:
        """Return the chunks per stage when `pipeline.num_repeats` is `num_repeats`."""
        return self.repeats or num_repeats


_SCHEDULES = "maxpipe.pipeline.schedules."
SCHEDULES: dict[str, Schedule] = {
    "circular": Schedule(
        _SCHEDULES + "lockstep:circular",
        engines=("circular",),
        repeats=None,
        delays=True,
        summary="all forwards, then all backwards, several chunks per stage",
    ),
    "gpipe": Schedule(
        _SCHEDULES + "lockstep:gpipe",
        engines=("circular", "mpmd"),
        delays=True,
        summary="all forwards, then all backwards, one chunk per stage",
    ),
    "lockstep_1f1b": Schedule(
        _SCHEDULES + "lockstep:lockstep_1f1b",
        engines=("scheduled",),
        repeats=None,
        delays=True,
        overlaps=True,
        summary="1F1B with several chunks per stage, in ticks of a forward and a backward",
    ),
    "lockstep_zb": Schedule(
        _SCHEDULES + "lockstep:lockstep_zb",
        engines=("scheduled",),
        repeats=None,
        delays=True,
        overlaps=True,
        splits_backward=True,
        summary="lockstep 1F1B with split backwards",
    ),
    "1f1b": Schedule(
        _SCHEDULES + "one_f_one_b:one_f_one_b",
        engines=("mpmd",),
        summary="forward and backward in turn: few microbatches are in flight",
    ),
    "eager_1f1b": Schedule(
        _SCHEDULES + "one_f_one_b:eager_1f1b",
        engines=("mpmd",),
        summary="1F1B with twice as many forwards at first, which hides transfers",
    ),
    "interleaved_1f1b": Schedule(
        _SCHEDULES + "one_f_one_b:interleaved_1f1b",
        engines=("mpmd",),
        repeats=None,
        summary="1F1B with several chunks per stage: a smaller bubble, more transfers",
    ),
    "zb_h1": Schedule(
        _SCHEDULES + "zero_bubble:zb_h1",
        engines=("mpmd",),
        splits_backward=True,
        summary="split backwards: a third of 1F1B's bubble in the memory of 1F1B",
    ),
    "interleaved_zb": Schedule(
        _SCHEDULES + "zero_bubble:interleaved_zb",
        engines=("mpmd",),
        repeats=None,
        splits_backward=True,
        summary="interleaved 1F1B with split backwards: weight gradients fill the bubble",
    ),
    "zb_h2": Schedule(
        _SCHEDULES + "zero_bubble:zb_h2",
        engines=("mpmd",),
        splits_backward=True,
        timed=True,
        summary="split backwards: hardly a wait within a stage, in twice the memory of 1F1B",
    ),
    "zb_v": Schedule(
        _SCHEDULES + "v_shape:zb_v",
        engines=("mpmd",),
        repeats=2,
        splits_backward=True,
        timed=True,
        summary="two chunks per stage in a V: no wait within a stage, in the memory of 1F1B",
    ),
    "v_half": Schedule(
        _SCHEDULES + "building_block:v_half",
        engines=("mpmd",),
        repeats=2,
        splits_backward=True,
        summary="two chunks per stage in a V: half of 1F1B's memory",
    ),
    "v_min": Schedule(
        _SCHEDULES + "building_block:v_min",
        engines=("mpmd",),
        repeats=2,
        splits_backward=True,
        summary="two chunks per stage in a V: a third of 1F1B's memory",
    ),
    "dualpipe_v": Schedule(
        _SCHEDULES + "v_shape:dualpipe_v",
        engines=("mpmd",),
        repeats=2,
        splits_backward=True,
        summary="two chunks per stage in a V: a forward of one with a backward of the other",
    ),
}


# Names that the decoder block gives its tensors.
QKV = ("query_proj", "key_proj", "value_proj")
MLP = ("mlp_gate", "mlp_up", "mlp_down")
MATMULS = (*QKV, "context", "out_proj", *MLP)
# Rows of experts are in the order of this choice: whoever saves them has to save it as well.
EXPERT_CHOICE = "expert_choice"
NAMED = (*MATMULS, EXPERT_CHOICE)


@dataclass(frozen=True)
class RematPolicy:
    """What a layer saves from forward to backward besides its input, `pipeline.remat_policy`.

    What it does not save, the backward recomputes.

    Attributes:
      device: names of tensors saved on the device.
      host: names of tensors saved in the host's memory.
      everything: whether all intermediate values are saved, whatever their names, except weights,
        copies of them, and results of element-wise operations other than sums.
      by_tensor: whether `pipeline.remat_tensors` says which tensors are saved.
      on_device: for a policy that offloads, the policy that saves the same tensors on the device.
    """

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    everything: bool = False
    by_tensor: bool = False
    on_device: str = ""

    @property
    def refused(self) -> tuple[str, ...]:
        """Return the keys of `pipeline.*` that have no effect."""
        return ("remat_layers",) * self.everything + ("remat_tensors",) * (not self.by_tensor)

    @property
    def saves_nothing(self) -> bool:
        """Return whether only the layer's input is saved, regardless of `remat_tensors`."""
        return not (self.device or self.host or self.everything or self.by_tensor)


REMAT_POLICIES: dict[str, RematPolicy] = {
    "custom": RematPolicy(by_tensor=True),
    "full": RematPolicy(),
    "minimal": RematPolicy(device=NAMED),
    "minimal_offloaded": RematPolicy(host=NAMED, on_device="minimal"),
    "none": RematPolicy(everything=True),
    "qkv_proj_offloaded": RematPolicy(host=QKV, on_device="save_qkv_proj"),
    "save_dot_except_mlp": RematPolicy(device=(*QKV, "out_proj")),
    "save_out_proj": RematPolicy(device=("out_proj",)),
    "save_qkv_proj": RematPolicy(device=QKV),
}


@dataclass(frozen=True, kw_only=True)
class Optimizer(Variant):
    """An optimizer, `optimizer.name`: a function (`optimizer.*`, specs) -> optax transformation.

    Attributes:
      moments: number of float32 state values per parameter.
      unused: keys of `optimizer.*` that it does not read.
    """

    moments: float
    unused: tuple[str, ...] = ()


_OPTIMIZERS = "maxpipe.training.optimizers:"
OPTIMIZERS: dict[str, Optimizer] = {
    "adafactor": Optimizer(
        _OPTIMIZERS + "adafactor",
        moments=0,
        unused=("beta1", "beta2", "eps"),
        summary="factored second moments, next to no state",
    ),
    "adamw": Optimizer(
        _OPTIMIZERS + "adamw", moments=2, summary="Adam with decoupled weight decay"
    ),
    "lion": Optimizer(
        _OPTIMIZERS + "lion",
        moments=1,
        unused=("eps",),
        summary="the sign of an average of gradients",
    ),
    "muon": Optimizer(
        _OPTIMIZERS + "muon",
        moments=2,
        summary="orthogonal updates of matrices; AdamW for everything else",
    ),
    "sgd": Optimizer(
        _OPTIMIZERS + "sgd",
        moments=1,
        unused=("beta2", "eps"),
        summary="gradient descent with momentum",
    ),
}


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Variant):
    """A learning-rate schedule, `optimizer.schedule`: a function that returns a share of the peak.

    The function takes the progress between warm-up and the end of the decay, 0 to 1, and
    `optimizer.*`.

    Attributes:
      unused: keys of `optimizer.*` that it does not read.
    """

    unused: tuple[str, ...] = ("stable_fraction",)


_LR_SCHEDULES = "maxpipe.training.optimizers:"
LR_SCHEDULES: dict[str, LearningRateSchedule] = {
    "constant": LearningRateSchedule(
        _LR_SCHEDULES + "constant",
        unused=("stable_fraction", "final_fraction"),
        summary="the peak rate after warm-up",
    ),
    "cosine": LearningRateSchedule(
        _LR_SCHEDULES + "cosine", summary="half a cosine down to final_fraction"
    ),
    "inverse_sqrt": LearningRateSchedule(
        _LR_SCHEDULES + "inverse_sqrt", summary="one over the square root of the step"
    ),
    "linear": LearningRateSchedule(
        _LR_SCHEDULES + "linear", summary="a straight line down to final_fraction"
    ),
    "wsd": LearningRateSchedule(
        _LR_SCHEDULES + "wsd", unused=(), summary="warm-up, stable, then a linear decay"
    ),
}


@dataclass(frozen=True, kw_only=True)
class DataSource(Variant):
    """A data source, `data.source`: a function (`data.*`) -> `Documents`.

    Attributes:
      needs_path: whether `data.path` says where the documents are; other sources read no path.
      suffixes: endings of the files that are read in a directory.
      companion: ending of the file next to each of these that is read with it, "" if none is.
      version: "module:function". For a source without a path, returns a text that changes whenever
        the documents do; "" if they never change. For one with a path, takes a part of the path
        and `data.cache_dir`, and returns the part's files and a digest of what else it depends on,
        or None for plain files; "" if there are only plain files.
      needs_tokenizer: whether the documents stand for text. Other sources draw ids, from as many as
        `data.tokenizer` has or, if the model has fewer, as the model has.
      is_chat: whether the documents are conversations, which `data.chat_template` lays out.
      has_column: whether `data.column` names the column that has the documents.
    """

    needs_path: bool = True
    suffixes: tuple[str, ...] = ("",)
    companion: str = ""
    version: str = ""
    needs_tokenizer: bool = True
    is_chat: bool = False
    has_column: bool = False

    @property
    def refused(self) -> tuple[str, ...]:
        """Return the keys of `data.*` that have no effect."""
        of_paths, of_chats = ("path", "eval_path"), ("chat_template", "chat_date")
        return (
            *(() if self.needs_path else of_paths),
            *(() if self.has_column else ("column",)),
            *(() if self.is_chat else of_chats),
        )


PACKED = (".gz", ".bz2", ".xz", ".zst", ".zstd")  # endings of files that are unpacked
_MAY_BE_PACKED = ("", *PACKED)
_JSON_LINES = (
    *(ending + packed for ending in (".jsonl", ".ndjson") for packed in _MAY_BE_PACKED),
    *(".json" + packed for packed in PACKED),  # a plain .json rather describes the others
)
_TABLES = (".json", ".jsonl", ".ndjson", ".csv")
_TABLE_FILES = (
    ".arrow",
    ".parquet",
    *(ending + packed for ending in _TABLES for packed in _MAY_BE_PACKED),
)
_SOURCES = "maxpipe.data.sources."
SOURCES: dict[str, DataSource] = {
    "array_record": DataSource(
        _SOURCES + "array_record:array_record",
        suffixes=(".array_record", ".arrayrecord"),
        summary="ArrayRecord files",
    ),
    "chat": DataSource(
        _SOURCES + "chat:chat",
        suffixes=(*_JSON_LINES, ".parquet"),
        is_chat=True,
        summary="conversations, `messages` in JSON lines or parquet",
    ),
    "datasets": DataSource(
        _SOURCES + "datasets:datasets",
        suffixes=_TABLE_FILES,
        version="maxpipe.data.sources.datasets:contents_of",
        has_column=True,
        summary="data sets of Hugging Face's `datasets`: saved ones, files, the hub's",
    ),
    "datasets_chat": DataSource(
        _SOURCES + "datasets:datasets_chat",
        suffixes=_TABLE_FILES,
        version="maxpipe.data.sources.datasets:contents_of",
        is_chat=True,
        has_column=True,
        summary="conversations in such data sets",
    ),
    "jsonl": DataSource(
        _SOURCES + "text:jsonl",
        suffixes=_JSON_LINES,
        summary="files of JSON lines, their `text`",
    ),
    "parquet": DataSource(
        _SOURCES + "parquet:parquet", suffixes=(".parquet",), summary="columns of parquet files"
    ),
    "python_help": DataSource(
        _SOURCES + "chat:python_help",
        needs_path=False,
        version=_SOURCES + "text:version_of_stdlib",
        is_chat=True,
        summary="conversations about functions of Python's standard library",
    ),
    "python_stdlib": DataSource(
        _SOURCES + "text:python_stdlib",
        needs_path=False,
        version=_SOURCES + "text:version_of_stdlib",
        summary="the source of Python's standard library",
    ),
    "synthetic": DataSource(
        _SOURCES + "tokens:synthetic",
        needs_path=False,
        needs_tokenizer=False,
        summary="random tokens, made as they are read",
    ),
    "text": DataSource(
        _SOURCES + "text:text", suffixes=_MAY_BE_PACKED, summary="text files, each a document"
    ),
    "token_bin": DataSource(
        _SOURCES + "tokens:token_bin",
        suffixes=(".bin", ".npy"),
        companion=".idx.npy",
        summary="files of token ids",
    ),
}


@dataclass(frozen=True)
class Tokenizer(Variant):
    """A tokenizer that needs no file, `data.tokenizer`: a class built without arguments.

    Attributes:
      vocab_size: number of token ids; 0 = not known before it is built.
    """

    vocab_size: int = 0


TOKENIZERS: dict[str, Tokenizer] = {
    "byte": Tokenizer(
        "maxpipe.data.tokenizers:ByteTokenizer", summary="bytes of UTF-8", vocab_size=259
    )
}
