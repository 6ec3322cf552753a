"""Hold the facts about every engine, as part of the catalogue; data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Values of a key that an engine refuses: "VALUE is not for the ENGINE engine: REASON; REMEDY".

    Attributes:
      values: refused values; empty = all values except the default.
      reads_others: whether the key's other values have an effect.
    """

    key: str
    values: tuple[object, ...]
    reason: str
    remedy: str
    reads_others: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine, `pipeline.engine`: a class that runs the model; most engines follow a schedule.

    Attributes:
      reads: the only keys of `pipeline.*` that it reads, without the section; empty = all but
        those below.
      unused: further keys that have no effect; a note says so if one is set.
      refusals: values that it refuses.
      no_offloading: why it cannot save tensors in the host's memory; empty if it can.
      has_stages: whether it divides layers into stages; otherwise it needs no schedule.
      one_program: whether one program runs on all devices; otherwise each stage has its own.
      lockstep: whether the ticks of its program follow the table of a lockstep schedule, and all
        stages share the head's tokens.
      runs_csv: whether it runs the table of a CSV file.
      whole_rounds: whether the microbatches must be a multiple of the stages.
      auto_stages: whether it takes `pipeline.layers_per_stage=auto`.
      trainer: "module:class" of the trainer that runs it.
    """

    implementation: str
    summary: str
    reads: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    no_offloading: str = ""
    has_stages: bool = True
    one_program: bool = True
    lockstep: bool = False
    runs_csv: bool = False
    whole_rounds: bool = False
    auto_stages: bool = False
    trainer: str = "maxpipe.training.trainer:SpmdTrainer"

    def takes(self, key: str) -> bool:
        """Return whether it reads a key; True for every key outside `pipeline.*`."""
        section, name = f"{key}.".split(".")[:2]
        if section != "pipeline":
            return True
        if self.reads:
            return name in ("engine", *self.reads)
        refused = {r.key for r in self.refusals if not r.reads_others}
        return name not in self.unused and f"pipeline.{name}" not in refused

    @property
    def is_differentiated(self) -> bool:
        """Return whether JAX differentiates its loop over iterations.

        With `per_iteration`, gradients are then summed over devices in every iteration.
        """
        return self.has_stages and self.one_program and not self.lockstep


_ENGINES = "maxpipe.pipeline.engines."
_LOCKSTEP = "use it with pipeline.schedule=lockstep_1f1b"
_CIRCULAR = "use true, or pipeline.schedule=circular"
_BACKWARDS_LAST = "its backwards begin after all forwards"
_LOOPS = "it always loops over the ticks of a phase"
_SINGLE_UNITS = "it dispatches units one by one"
_NO_TICKS = "it has no ticks and starts a unit as soon as its inputs have arrived"
_CHUNKS = Refusal(
    "pipeline.scan_layers",
    (False,),
    "its stages run chunks of layers",
    "use pipeline.scan_layers_per_stage=false, and leave this at true",
)
ENGINES: dict[str, Engine] = {
    "sequential": Engine(
        _ENGINES + "sequential:SequentialEngine",
        "the whole model on every device, without stages",
        reads=("num_microbatches", "scan_layers", "remat_policy", "remat_tensors"),
        has_stages=False,
    ),
    "circular": Engine(
        _ENGINES + "circular.engine:CircularEngine",
        "one program in which activations go around a ring of stages; JAX derives the backward",
        unused=("unit_times", "memory_limit_gib"),
        refusals=(
            _CHUNKS,
            Refusal("pipeline.overlap_slots", (True,), _BACKWARDS_LAST, _LOCKSTEP),
            Refusal("pipeline.skip_idle", ("true",), "all stages are one batch", _LOCKSTEP),
            Refusal(
                "pipeline.fsdp_prefetch",
                ("true",),
                "the compiler gathers its weights where layers use them",
                "use pipeline.fsdp_gather=per_repeat or pipeline.schedule=lockstep_1f1b",
            ),
        ),
        whole_rounds=True,
    ),
    "scheduled": Engine(
        _ENGINES + "scheduled.engine:ScheduledEngine",
        "one program whose ticks follow the table of a lockstep schedule",
        unused=("unit_times", "memory_limit_gib"),
        refusals=(
            _CHUNKS,
            Refusal("pipeline.scan_iterations", (False,), _LOOPS, _CIRCULAR),
            Refusal("pipeline.scan_repeats", (False,), _LOOPS, _CIRCULAR),
            Refusal(
                "pipeline.fsdp_gather",
                ("per_repeat",),
                "F and B of a tick are in different repeats, so 4 to 6 would be kept gathered",
                "use per_iteration, once or pipeline.schedule=circular",
                reads_others=True,
            ),
        ),
        no_offloading="its loop updates buffers of residuals in place, and libtpu 0.0.42 aborts "
        "where such a buffer is in the host's memory (tpu_layout_assignment.cc)",
        lockstep=True,
        runs_csv=True,
    ),
    "mpmd": Engine(
        _ENGINES + "mpmd.engine:MpmdEngine",
        "a program per stage and kind of unit, dispatched in the schedule's order",
        unused=("remat_cheap",),
        refusals=(
            _CHUNKS,
            Refusal("pipeline.overlap_slots", (True,), _NO_TICKS, _LOCKSTEP),
            Refusal("pipeline.skip_idle", ("true",), _NO_TICKS, _LOCKSTEP),
            Refusal("pipeline.fsdp_prefetch", ("true",), _NO_TICKS, _LOCKSTEP),
            Refusal("pipeline.delay_activation_forwarding", (True,), _NO_TICKS, "use false"),
            Refusal(
                "pipeline.fsdp_gather",
                ("per_repeat",),
                "each chunk of a stage has weights of its own",
                "use once, which gathers them for all its units, or per_iteration",
                reads_others=True,
            ),
            Refusal("pipeline.scan_iterations", (False,), _SINGLE_UNITS, _CIRCULAR),
            Refusal("pipeline.scan_repeats", (False,), _SINGLE_UNITS, _CIRCULAR),
            Refusal("compile.load", (), "a file holds one program, it runs many", "leave it empty"),
        ),
        one_program=False,
        runs_csv=True,
        auto_stages=True,
        trainer="maxpipe.training.mpmd_trainer:MpmdTrainer",
    ),
}
