"""Hold the facts about every variant that a configuration key can name; data only.

A variant is one entry here and one function or class, which `implementation` names as
"module:attribute"; it is imported when a run uses it. This module imports nothing of maxpipe.
Errors, checks, `--help`, the documentation and the tests read these tables, so a fact stands
nowhere else. Another package adds a variant by adding an entry before it calls a command:

    from maxpipe.config import catalog
    catalog.OPTIMIZERS["mine"] = catalog.Optimizer("my_package.optimizers:mine", moments=1)
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule, `pipeline.schedule`: a function (num_stages, num_microbatches) -> `Table`.

    Attributes:
      implementation: "module:function".
      engines: engines that run it; `pipeline.engine=auto` picks the first.
      repeats: chunks per stage, `pipeline.num_repeats`; None if any number is legal, which the
        function then takes as `num_repeats`.
      delays: whether `pipeline.delay_activation_forwarding` applies; the function then takes
        `forwarding_delay`.
      overlaps: whether `pipeline.overlap_slots` applies; the function then takes `slack`.
      splits_backward: whether the table has units for input and weight gradients.
    """

    implementation: str
    engines: tuple[str, ...]
    repeats: int | None = 1
    delays: bool = False
    overlaps: bool = False
    splits_backward: bool = False

    def repeats_for(self, num_repeats: int) -> int:
        """Return the chunks per stage when `pipeline.num_repeats` is `num_repeats`."""
        return self.repeats or num_repeats


_SCHEDULES = "maxpipe.pipeline.schedules."
SCHEDULES: dict[str, Schedule] = {
    "circular": Schedule(
        _SCHEDULES + "circular:circular", ("circular",), repeats=None, delays=True
    ),
    "gpipe": Schedule(_SCHEDULES + "circular:gpipe", ("circular", "mpmd"), delays=True),
    "lockstep_1f1b": Schedule(
        _SCHEDULES + "lockstep:lockstep_1f1b",
        ("scheduled",),
        repeats=None,
        delays=True,
        overlaps=True,
    ),
    "lockstep_zb": Schedule(
        _SCHEDULES + "lockstep:lockstep_zb",
        ("scheduled",),
        repeats=None,
        delays=True,
        overlaps=True,
        splits_backward=True,
    ),
    "1f1b": Schedule(_SCHEDULES + "one_f_one_b:one_f_one_b", ("mpmd",)),
    "eager_1f1b": Schedule(_SCHEDULES + "one_f_one_b:eager_1f1b", ("mpmd",)),
    "interleaved_1f1b": Schedule(
        _SCHEDULES + "one_f_one_b:interleaved_1f1b", ("mpmd",), repeats=None
    ),
    "zb_h1": Schedule(_SCHEDULES + "zero_bubble:zb_h1", ("mpmd",), splits_backward=True),
    "interleaved_zb": Schedule(
        _SCHEDULES + "zero_bubble:interleaved_zb", ("mpmd",), repeats=None, splits_backward=True
    ),
    "zb_h2": Schedule(_SCHEDULES + "zero_bubble:zb_h2", ("mpmd",), splits_backward=True),
    "zb_v": Schedule(_SCHEDULES + "v_shape:zb_v", ("mpmd",), repeats=2, splits_backward=True),
    "v_half": Schedule(
        _SCHEDULES + "building_block:v_half", ("mpmd",), repeats=2, splits_backward=True
    ),
    "v_min": Schedule(
        _SCHEDULES + "building_block:v_min", ("mpmd",), repeats=2, splits_backward=True
    ),
    "dualpipe_v": Schedule(
        _SCHEDULES + "v_shape:dualpipe_v", ("mpmd",), repeats=2, splits_backward=True
    ),
}


@dataclass(frozen=True)
class Refusal:
    """Values of a key that an engine refuses: "VALUE is not for the ENGINE engine: REASON; REMEDY".

    Attributes:
      key: the full key.
      values: refused values; empty for all but the default.
      reason: why the engine cannot take them.
      remedy: what to write instead.
    """

    key: str
    values: tuple[object, ...]
    reason: str
    remedy: str


@dataclass(frozen=True)
class Engine:
    """An engine, `pipeline.engine`: a class that runs the model, most of them by a schedule.

    Attributes:
      implementation: "module:class".
      summary: what it is, a phrase.
      unused: keys of `pipeline.*` that it does not read, without the section; a value of theirs is
        refused or has no effect.
      refusals: values that it refuses.
      no_offloading: why it cannot save tensors in the host's memory; empty if it can.
      has_stages: whether it divides layers into stages; otherwise it needs no schedule.
      one_program: whether one program runs on all devices; otherwise each stage has its own.
      lockstep: whether the ticks of its program follow the table of a lockstep schedule, and all
        stages share the head's tokens.
      runs_csv: whether it runs the table of a CSV file.
      whole_rounds: whether the microbatches must be a multiple of the stages.
      outside_layers: whether layers may run outside the pipeline, `pipeline.parallel_layers`.
      auto_stages: whether it takes `pipeline.layers_per_stage=auto`.
      several_processes: whether devices of several processes may take part.
    """

    implementation: str
    summary: str
    unused: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    no_offloading: str = ""
    has_stages: bool = True
    one_program: bool = True
    lockstep: bool = False
    runs_csv: bool = False
    whole_rounds: bool = False
    outside_layers: bool = False
    auto_stages: bool = False
    several_processes: bool = True

    def takes(self, key: str) -> bool:
        """Return whether it reads a key; True for every key outside `pipeline.*`."""
        section, _, name = key.partition(".")
        return section != "pipeline" or name not in self.unused


_ENGINES = "maxpipe.pipeline.engines."
_LOCKSTEP = "use it with pipeline.schedule=lockstep_1f1b"
_CIRCULAR = "use true, or pipeline.schedule=circular"
_LOOPS = "it always loops over the ticks of a phase"
_SINGLE_UNITS = "it dispatches units one by one"
_NO_TICKS = "it has no ticks and starts a unit as soon as its inputs have arrived"
ENGINES: dict[str, Engine] = {
    "sequential": Engine(
        _ENGINES + "sequential:SequentialEngine",
        "the whole model on every device, without stages",
        unused=(
            "schedule",
            "num_repeats",
            "num_layers_per_stage",
            "layers_per_stage",
            "parallel_layers",
            "outside_layers",
            "delay_activation_forwarding",
            "overlap_slots",
            "skip_idle",
            "fsdp_gather",
            "scan_iterations",
            "scan_repeats",
            "scan_layers_per_stage",
            "remat_iterations",
            "remat_layers",
            "memory_limit_gib",
        ),
        has_stages=False,
    ),
    "circular": Engine(
        _ENGINES + "circular.engine:CircularEngine",
        "one program in which activations go around a ring of stages; JAX derives the backward",
        unused=("overlap_slots", "skip_idle", "memory_limit_gib"),
        refusals=(
            Refusal(
                "pipeline.overlap_slots",
                (True,),
                "its backwards begin after all forwards",
                _LOCKSTEP,
            ),
            Refusal(
                "pipeline.skip_idle",
                ("true",),
                "all stages compute in one batched operation, the idle ones masked",
                _LOCKSTEP,
            ),
        ),
        whole_rounds=True,
        outside_layers=True,
    ),
    "scheduled": Engine(
        _ENGINES + "scheduled.engine:ScheduledEngine",
        "one program whose ticks follow the table of a lockstep schedule",
        unused=(
            "parallel_layers",
            "outside_layers",
            "scan_iterations",
            "scan_repeats",
            "memory_limit_gib",
        ),
        refusals=(
            Refusal("pipeline.scan_iterations", (False,), _LOOPS, _CIRCULAR),
            Refusal("pipeline.scan_repeats", (False,), _LOOPS, _CIRCULAR),
            Refusal(
                "pipeline.fsdp_gather",
                ("per_repeat",),
                "F and B of a tick are in different repeats, so 4 to 6 would be kept gathered",
                "use per_iteration, or use once if all repeats fit, or pipeline.schedule=circular",
            ),
        ),
        no_offloading="it updates its residuals in place on the device, where their size does not "
        "depend on the number of microbatches",
        lockstep=True,
        runs_csv=True,
    ),
    "mpmd": Engine(
        _ENGINES + "mpmd.engine:MpmdEngine",
        "a program per stage and kind of unit, dispatched from one process in the schedule's order",
        unused=(
            "parallel_layers",
            "outside_layers",
            "delay_activation_forwarding",
            "overlap_slots",
            "skip_idle",
            "fsdp_gather",
            "scan_iterations",
            "scan_repeats",
        ),
        refusals=(
            Refusal("pipeline.overlap_slots", (True,), _NO_TICKS, _LOCKSTEP),
            Refusal("pipeline.skip_idle", ("true",), _NO_TICKS, _LOCKSTEP),
            Refusal(
                "pipeline.delay_activation_forwarding",
                (True,),
                "it has no ticks, and its transfers overlap with units anyway",
                "use false",
            ),
            Refusal(
                "pipeline.fsdp_gather",
                ("per_repeat", "once"),
                "every unit is a program of its own that gathers its weights",
                "use per_iteration",
            ),
            Refusal("pipeline.scan_iterations", (False,), _SINGLE_UNITS, _CIRCULAR),
            Refusal("pipeline.scan_repeats", (False,), _SINGLE_UNITS, _CIRCULAR),
            Refusal(
                "compile.load",
                (),
                "a file holds one program for all devices, and it runs many",
                "leave it empty",
            ),
        ),
        no_offloading="its residuals pass from one program to another on the device",
        one_program=False,
        runs_csv=True,
        auto_stages=True,
        several_processes=False,
    ),
}


# Names that the decoder block gives its tensors.
QKV = ("query_proj", "key_proj", "value_proj")
MATMULS = (*QKV, "context", "out_proj", "mlp_gate", "mlp_up", "mlp_down")


@dataclass(frozen=True)
class RematPolicy:
    """What a layer saves from forward to backward besides its input, `pipeline.remat_policy`.

    What it does not save, the backward recomputes.

    Attributes:
      device: names of tensors saved on the device.
      host: names of tensors saved in the host's memory.
      everything: whether all intermediate values are saved, whatever their names; weights and
        copies of them are not.
      by_tensor: whether `pipeline.remat_tensors` says which tensors are saved.
      on_device: for a policy that offloads, the policy that saves the same tensors on the device.
    """

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    everything: bool = False
    by_tensor: bool = False
    on_device: str = ""

    @property
    def saves_nothing(self) -> bool:
        """Return whether only the layer's input is saved, without asking `remat_tensors`."""
        return not (self.device or self.host or self.everything or self.by_tensor)


REMAT_POLICIES: dict[str, RematPolicy] = {
    "custom": RematPolicy(by_tensor=True),
    "full": RematPolicy(),
    "minimal": RematPolicy(device=MATMULS),
    "minimal_offloaded": RematPolicy(host=MATMULS, on_device="minimal"),
    "none": RematPolicy(everything=True),
    "qkv_proj_offloaded": RematPolicy(host=QKV, on_device="save_qkv_proj"),
    "save_dot_except_mlp": RematPolicy(device=(*QKV, "out_proj")),
    "save_out_proj": RematPolicy(device=("out_proj",)),
    "save_qkv_proj": RematPolicy(device=QKV),
}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, `optimizer.name`: a function (`optimizer.*`, specs) -> optax transformation.

    Attributes:
      implementation: "module:function".
      moments: float32 values of state per parameter.
      unused: keys of `optimizer.*` that it does not read.
    """

    implementation: str
    moments: float
    unused: tuple[str, ...] = ()


_OPTIMIZERS = "maxpipe.training.optimizers:"
OPTIMIZERS: dict[str, Optimizer] = {
    "adafactor": Optimizer(_OPTIMIZERS + "adafactor", moments=0, unused=("beta1", "beta2", "eps")),
    "adamw": Optimizer(_OPTIMIZERS + "adamw", moments=2),
    "lion": Optimizer(_OPTIMIZERS + "lion", moments=1, unused=("eps",)),
    "muon": Optimizer(_OPTIMIZERS + "muon", moments=2),
    "sgd": Optimizer(_OPTIMIZERS + "sgd", moments=1, unused=("beta2", "eps")),
}


@dataclass(frozen=True)
class LearningRateSchedule:
    """A learning-rate schedule, `optimizer.schedule`: a function that returns a share of the peak.

    The function takes the progress between warm-up and the end of the decay, 0 to 1, and
    `optimizer.*`.

    Attributes:
      implementation: "module:function".
      unused: keys of `optimizer.*` that it does not read.
    """

    implementation: str
    unused: tuple[str, ...] = ("stable_fraction",)


_LR_SCHEDULES = "maxpipe.training.lr_schedules:"
LR_SCHEDULES: dict[str, LearningRateSchedule] = {
    "constant": LearningRateSchedule(
        _LR_SCHEDULES + "constant", unused=("stable_fraction", "final_fraction")
    ),
    "cosine": LearningRateSchedule(_LR_SCHEDULES + "cosine"),
    "inverse_sqrt": LearningRateSchedule(_LR_SCHEDULES + "inverse_sqrt"),
    "linear": LearningRateSchedule(_LR_SCHEDULES + "linear"),
    "wsd": LearningRateSchedule(_LR_SCHEDULES + "wsd", unused=()),
}


@dataclass(frozen=True)
class DataSource:
    """A data source, `data.source`: a function (`data.*`) -> `Documents`.

    Attributes:
      implementation: "module:function".
      needs_path: whether `data.path` says where the documents are; other sources read no path.
      suffixes: endings of the files that are read in a directory.
      companion: ending of a file next to each of them that is read with it, "" if there is none.
      version: "module:function" of a source without a path: returns a text that changes whenever
        the documents do. "" for documents that never change.
    """

    implementation: str
    needs_path: bool = True
    suffixes: tuple[str, ...] = ("",)
    companion: str = ""
    version: str = ""


_SOURCES = "maxpipe.data.sources."
SOURCES: dict[str, DataSource] = {
    "array_record": DataSource(
        _SOURCES + "array_record:array_record", suffixes=(".array_record", ".arrayrecord")
    ),
    "jsonl": DataSource(_SOURCES + "text:jsonl", suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst")),
    "parquet": DataSource(_SOURCES + "parquet:parquet", suffixes=(".parquet",)),
    "python_stdlib": DataSource(
        _SOURCES + "text:python_stdlib",
        needs_path=False,
        version=_SOURCES + "text:version_of_stdlib",
    ),
    "synthetic": DataSource(_SOURCES + "tokens:synthetic", needs_path=False),
    "text": DataSource(_SOURCES + "text:text"),
    "token_bin": DataSource(
        _SOURCES + "tokens:token_bin", suffixes=(".bin", ".npy"), companion=".idx.npy"
    ),
}


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel, `model.attention`: a class with `unfit`, `build` and `build_for_parts`.

    Attributes:
      implementation: "module:class".
      platforms: backends that it runs on.
      preferred_on: backends on which `model.attention=auto` picks it if the sizes fit.
    """

    implementation: str
    platforms: tuple[str, ...]
    preferred_on: tuple[str, ...] = ()


_KERNELS = "maxpipe.model.kernels."
KERNELS: dict[str, AttentionKernel] = {
    "dot_product": AttentionKernel(_KERNELS + "dot_product:DotProduct", ("cpu", "gpu", "tpu")),
    "splash": AttentionKernel(_KERNELS + "splash:Splash", ("tpu",), preferred_on=("tpu",)),
}


@dataclass(frozen=True)
class Block:
    """A decoder block, `model.block`: a Flax NNX module built from `model.*`.

    Attributes:
      implementation: "module:class".
    """

    implementation: str


BLOCKS: dict[str, Block] = {"llama": Block("maxpipe.model.block:LlamaBlock")}


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that needs no file, `data.tokenizer`: a class built without arguments.

    Attributes:
      implementation: "module:class".
    """

    implementation: str


TOKENIZERS: dict[str, Tokenizer] = {"byte": Tokenizer("maxpipe.data.tokenizers:ByteTokenizer")}
