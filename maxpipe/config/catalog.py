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
from typing import Any

from maxpipe.config.engine_facts import *  # noqa: F403
from maxpipe.config.model_facts import *  # noqa: F403
from maxpipe.config.model_facts import Variant


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
        return () if self.timed else ("unit_times",)

    def repeats_for(self, num_repeats: int) -> int:
        """Return the chunks per stage when `pipeline.num_repeats` is `num_repeats`."""
        return self.repeats or num_repeats


def _lockstep(function: str, summary: str, **facts: Any) -> Schedule:
    place, engines = f"maxpipe.pipeline.schedules.lockstep:{function}", ("scheduled",)
    return Schedule(
        place, summary, engines=engines, repeats=None, delays=True, overlaps=True, **facts
    )


def _mpmd(place: str, summary: str, **facts: Any) -> Schedule:
    return Schedule(f"maxpipe.pipeline.schedules.{place}", summary, engines=("mpmd",), **facts)


def _split(place: str, summary: str, **facts: Any) -> Schedule:
    return _mpmd(place, summary, splits_backward=True, **facts)


SCHEDULES: dict[str, Schedule] = {
    "circular": Schedule(
        "maxpipe.pipeline.schedules.lockstep:circular",
        "all forwards, then all backwards, several chunks per stage",
        engines=("circular",),
        repeats=None,
        delays=True,
    ),
    "gpipe": Schedule(
        "maxpipe.pipeline.schedules.lockstep:gpipe",
        "all forwards, then all backwards, one chunk per stage",
        engines=("circular", "mpmd"),
        delays=True,
    ),
    "lockstep_1f1b": _lockstep(
        "lockstep_1f1b", "1F1B with several chunks per stage, in ticks of a forward and a backward"
    ),
    "lockstep_zb": _lockstep(
        "lockstep_zb", "lockstep 1F1B with split backwards", splits_backward=True
    ),
    "1f1b": _mpmd(
        "one_f_one_b:one_f_one_b", "forward and backward in turn: few microbatches are in flight"
    ),
    "eager_1f1b": _mpmd(
        "one_f_one_b:eager_1f1b", "1F1B with twice as many forwards at first, which hides transfers"
    ),
    "interleaved_1f1b": _mpmd(
        "one_f_one_b:interleaved_1f1b",
        "1F1B with several chunks per stage: a smaller bubble, more transfers",
        repeats=None,
    ),
    "zb_h1": _split(
        "zero_bubble:zb_h1", "split backwards: a third of 1F1B's bubble in the memory of 1F1B"
    ),
    "interleaved_zb": _split(
        "zero_bubble:interleaved_zb",
        "interleaved 1F1B with split backwards: weight gradients fill the bubble",
        repeats=None,
    ),
    "zb_h2": _split(
        "zero_bubble:zb_h2",
        "split backwards: hardly a wait within a stage, in twice the memory of 1F1B",
        timed=True,
    ),
    "zb_v": _split(
        "v_shape:zb_v",
        "two chunks per stage in a V: no wait within a stage, in the memory of 1F1B",
        repeats=2,
        timed=True,
    ),
    "v_half": _split(
        "building_block:v_half", "two chunks per stage in a V: half of 1F1B's memory", repeats=2
    ),
    "v_min": _split(
        "building_block:v_min", "two chunks per stage in a V: a third of 1F1B's memory", repeats=2
    ),
    "dualpipe_v": _split(
        "v_shape:dualpipe_v",
        "a V of two chunks: a forward of one with a backward of the other",
        repeats=2,
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
      device, host: names of tensors saved on the device, and in the host's memory.
      everything: whether all intermediate values are saved, whatever their names, except weights,
        copies of them, and results of element-wise operations other than sums.
      by_tensor: whether `pipeline.remat_tensors` says which tensors are saved.
      on_device: for a policy that offloads, the policy that saves the same tensors on the device.
      summary: a phrase for `--help`, where the names of the tensors do not say it.
    """

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    everything: bool = False
    by_tensor: bool = False
    on_device: str = ""
    summary: str = ""

    @property
    def refused(self) -> tuple[str, ...]:
        return ("remat_layers",) * self.everything + ("remat_tensors",) * (not self.by_tensor)

    @property
    def saves_nothing(self) -> bool:
        """Return whether only the layer's input is saved, regardless of `remat_tensors`."""
        return not (self.device or self.host or self.everything or self.by_tensor)


REMAT_POLICIES: dict[str, RematPolicy] = {
    "custom": RematPolicy(by_tensor=True, summary="as pipeline.remat_tensors says"),
    "full": RematPolicy(summary="saves the input of a layer only"),
    "minimal": RematPolicy(device=NAMED),
    "minimal_offloaded": RematPolicy(host=NAMED, on_device="minimal"),
    "none": RematPolicy(everything=True, summary="saves all but element-wise results"),
    "qkv_proj_offloaded": RematPolicy(host=QKV, on_device="save_qkv_proj"),
    "save_dot_except_mlp": RematPolicy(device=(*QKV, "out_proj")),
    "save_out_proj": RematPolicy(device=("out_proj",)),
    "save_qkv_proj": RematPolicy(device=QKV),
}


@dataclass(frozen=True, kw_only=True)
class Optimizer(Variant):
    """An optimizer, `optimizer.name`: a function (`optimizer.*`, specs) -> optax transformation.

    It has `moments` state values per parameter, does not read the keys `unused`, and refuses
    `refused`.
    """

    moments: float
    unused: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


_OPTIMIZERS = "maxpipe.training.optimizers:"
OPTIMIZERS: dict[str, Optimizer] = {
    "adafactor": Optimizer(
        _OPTIMIZERS + "adafactor",
        "factored second moments, next to no state",
        moments=0,
        unused=("beta1", "beta2", "eps"),
        refused=("moment_dtype",),
    ),
    "adamw": Optimizer(_OPTIMIZERS + "adamw", "Adam with decoupled weight decay", moments=2),
    "lion": Optimizer(
        _OPTIMIZERS + "lion", "the sign of an average of gradients", moments=1, unused=("eps",)
    ),
    "muon": Optimizer(
        _OPTIMIZERS + "muon", "orthogonal updates of matrices; AdamW for all else", moments=2
    ),
    "sgd": Optimizer(
        _OPTIMIZERS + "sgd", "gradient descent with momentum", moments=1, unused=("beta2", "eps")
    ),
}


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule(Variant):
    """A learning-rate schedule, `optimizer.schedule`: a function that returns a share of the peak.

    The function takes the progress between warm-up and the end of the decay, 0 to 1, and
    `optimizer.*`, of which it does not read the keys `unused`.
    """

    unused: tuple[str, ...] = ("stable_fraction",)


LR_SCHEDULES: dict[str, LearningRateSchedule] = {
    "constant": LearningRateSchedule(
        _OPTIMIZERS + "constant",
        "the peak rate after warm-up",
        unused=("stable_fraction", "final_fraction"),
    ),
    "cosine": LearningRateSchedule(_OPTIMIZERS + "cosine", "half a cosine down to final_fraction"),
    "inverse_sqrt": LearningRateSchedule(
        _OPTIMIZERS + "inverse_sqrt", "one over the square root of the step"
    ),
    "linear": LearningRateSchedule(
        _OPTIMIZERS + "linear", "a straight line down to final_fraction"
    ),
    "wsd": LearningRateSchedule(
        _OPTIMIZERS + "wsd", "warm-up, stable, then a linear decay", unused=()
    ),
}


@dataclass(frozen=True, kw_only=True)
class DataSource(Variant):
    """A data source, `data.source`: a function (`data.*`) -> `Documents`.

    Attributes:
      needs_path: whether `data.path` says where the documents are; other sources read no path.
      suffixes: endings of the files that are read in a directory.
      by_prefix: whether `data.path` may also name files without their ending, or the companions.
      companion: ending of the file next to each of these that is read with it, "" if none is.
      version: "module:function". For a source without a path, returns a text that changes whenever
        the documents do; "" if they never change. For one with a path, takes a part of the path
        and `data.*`, and returns the part's files and a digest of what else it depends on,
        or None for plain files; "" if there are only plain files.
      needs_tokenizer: whether the documents stand for text. Other sources draw ids, from as many as
        `data.tokenizer` has or, if the model has fewer, as the model has.
      is_chat: whether the documents are conversations, which `data.chat_template` lays out.
      has_column: whether `data.column` names the column that has the documents.
      streams: whether `data.stream` reads files as they are needed.
      knows_lengths: whether documents have `lengths`, so that a mixture may be weighted by tokens.
    """

    needs_path: bool = True
    suffixes: tuple[str, ...] = ("",)
    by_prefix: bool = False
    companion: str = ""
    version: str = ""
    needs_tokenizer: bool = True
    is_chat: bool = False
    has_column: bool = False
    streams: bool = False
    knows_lengths: bool = False

    @property
    def refused(self) -> tuple[str, ...]:
        of_paths, of_chats = ("path", "eval_path"), ("chat_template", "chat_date")
        return (
            *(() if self.needs_path else of_paths),
            *(() if self.has_column else ("column",)),
            *(() if self.streams else ("stream",)),
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
    *(".arrow", ".parquet"),
    *(ending + packed for ending in _TABLES for packed in _MAY_BE_PACKED),
)
_SOURCES = "maxpipe.data.sources."


def _datasets(function: str, summary: str, is_chat: bool = False) -> DataSource:
    return DataSource(
        f"{_SOURCES}datasets:{function}",
        summary,
        suffixes=_TABLE_FILES,
        version=f"{_SOURCES}datasets:contents_of",
        is_chat=is_chat,
        has_column=True,
        streams=not is_chat,
    )


def _python(place: str, summary: str, is_chat: bool = False) -> DataSource:
    version = f"{_SOURCES}text:version_of_stdlib"
    return DataSource(_SOURCES + place, summary, needs_path=False, version=version, is_chat=is_chat)


SOURCES: dict[str, DataSource] = {
    "array_record": DataSource(
        _SOURCES + "array_record:array_record",
        "ArrayRecord files",
        suffixes=(".array_record", ".arrayrecord"),
    ),
    "chat": DataSource(
        _SOURCES + "chat:chat",
        "conversations, `messages` in JSON lines or parquet",
        suffixes=(*_JSON_LINES, ".parquet"),
        is_chat=True,
    ),
    "datasets": _datasets(
        "datasets", "data sets of Hugging Face's `datasets`: saved ones, files, the hub's"
    ),
    "datasets_chat": _datasets("datasets_chat", "conversations in such data sets", is_chat=True),
    "jsonl": DataSource(
        _SOURCES + "text:jsonl", "files of JSON lines, their `text`", suffixes=_JSON_LINES
    ),
    "megatron": DataSource(
        _SOURCES + "megatron:megatron",
        "token ids as Megatron-LM writes them, PREFIX.bin with PREFIX.idx",
        suffixes=(".bin",),
        by_prefix=True,
        companion=".idx",
        knows_lengths=True,
    ),
    "parquet": DataSource(
        _SOURCES + "parquet:parquet",
        "columns of parquet files",
        suffixes=(".parquet",),
        streams=True,
    ),
    "python_help": _python(
        "chat:python_help",
        "conversations about functions of Python's standard library",
        is_chat=True,
    ),
    "python_stdlib": _python("text:python_stdlib", "the source of Python's standard library"),
    "synthetic": DataSource(
        _SOURCES + "tokens:synthetic",
        "random tokens, made as they are read",
        needs_path=False,
        needs_tokenizer=False,
    ),
    "text": DataSource(
        _SOURCES + "text:text", "text files, each a document", suffixes=_MAY_BE_PACKED
    ),
    "token_bin": DataSource(
        _SOURCES + "tokens:token_bin",
        "files of token ids",
        suffixes=(".bin", ".npy"),
        companion=".idx.npy",
        knows_lengths=True,
    ),
}


@dataclass(frozen=True)
class Tokenizer(Variant):
    """A tokenizer that needs no file: a class built without arguments, with `vocab_size` ids.

    0 = not known before it is built.
    """

    vocab_size: int = 0


TOKENIZERS: dict[str, Tokenizer] = {
    "byte": Tokenizer(
        "maxpipe.data.tokenizers:ByteTokenizer", summary="bytes of UTF-8", vocab_size=259
    )
}
