"""The facts about every variant that a configuration key can name: data only, imports nothing of maxpipe.

A variant is one entry here and one function or class, which `implementation` names as
"module:attribute"; it is imported when a run uses it. Errors, checks, `--help`, the documentation
and the tests read these tables, so a fact stands nowhere else. A package of its own adds a variant
by adding an entry before it calls a command:

    from maxpipe.config import catalog
    catalog.OPTIMIZERS["mine"] = catalog.Optimizer("my_package.optimizers:mine", moments=1)
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule, `pipeline.schedule`: a function of (num_stages, num_microbatches) that returns a `Table`.

    Attributes:
      implementation: "module:function".
      engines: engines that run it; `pipeline.engine=auto` picks the first.
      repeats: chunks per stage, `pipeline.num_repeats`; None if any number will do, which the
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
        """Return the chunks per stage that the schedule has when `num_repeats` are asked for."""
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
    "zb_h2": Schedule(_SCHEDULES + "zero_bubble:zb_h2", ("mpmd",), splits_backward=True),
    "zb_v": Schedule(_SCHEDULES + "v_shape:zb_v", ("mpmd",), repeats=2, splits_backward=True),
    "v_half": Schedule(_SCHEDULES + "v_shape:v_half", ("mpmd",), repeats=2, splits_backward=True),
    "v_min": Schedule(_SCHEDULES + "v_shape:v_min", ("mpmd",), repeats=2, splits_backward=True),
    "dualpipe_v": Schedule(
        _SCHEDULES + "v_shape:dualpipe_v", ("mpmd",), repeats=2, splits_backward=True
    ),
}

CSV_ENGINES = ("scheduled", "mpmd")  # engines that run the table of a CSV file


# Names that the decoder block gives its tensors; those of a mixture's experts are the same as of an
# MLP.
QKV = ("query_proj", "key_proj", "value_proj")
MATMULS = (*QKV, "context", "out_proj", "mlp_gate", "mlp_up", "mlp_down")


@dataclass(frozen=True)
class RematPolicy:
    """What a layer saves from forward to backward besides its input, `pipeline.remat_policy`.

    Attributes:
      device: names of tensors saved on the device.
      host: names of tensors saved in the host's memory.
      everything: all intermediate values are saved, whatever their name; weights and copies of them
        excepted.
      by_tensor: `pipeline.remat_tensors` says which tensors are saved.
      on_device: for a policy that offloads, the policy that saves the same tensors on the device.
    """

    device: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    everything: bool = False
    by_tensor: bool = False
    on_device: str = ""


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
    """An optimizer, `optimizer.name`: a function of (`optimizer.*`, specs) that returns an optax transformation.

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
    """A learning-rate schedule, `optimizer.schedule`: (progress, `optimizer.*`) -> share of the peak rate.

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
    """A data source, `data.source`: a function of `data.*` that returns `Documents`.

    Attributes:
      implementation: "module:function".
      needs_path: whether `data.path` says where the documents are; otherwise the source has its
        own.
    """

    implementation: str
    needs_path: bool = True


_SOURCES = "maxpipe.data.sources."
SOURCES: dict[str, DataSource] = {
    "array_record": DataSource(_SOURCES + "array_record:build"),
    "jsonl": DataSource(_SOURCES + "jsonl:build"),
    "parquet": DataSource(_SOURCES + "parquet:build"),
    "python_stdlib": DataSource(_SOURCES + "python_stdlib:build", needs_path=False),
    "synthetic": DataSource(_SOURCES + "synthetic:build", needs_path=False),
    "text": DataSource(_SOURCES + "text:build"),
    "token_bin": DataSource(_SOURCES + "token_bin:build"),
}


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel, `model.attention`: a class with `unfit`, `build` and `build_for_parts`.

    Attributes:
      implementation: "module:class".
      platforms: backends that it runs on.
      preferred_on: backends on which `model.attention=auto` takes it, if the sizes fit.
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


TOKENIZERS: dict[str, Tokenizer] = {"byte": Tokenizer("maxpipe.data.tokenizers.byte:ByteTokenizer")}
