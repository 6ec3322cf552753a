"""`pipeline.*`: how layers become stages and batches become microbatches."""

from dataclasses import dataclass

from maxpipe.config.sections._option import option

ENGINES = ("auto", "sequential", "circular", "scheduled")


@dataclass(frozen=True)
class PipelineConfig:
    engine: str = option("auto", "what runs the schedule; auto picks by schedule", choices=ENGINES)
    schedule: str = option("circular", "order of work, or the path of a CSV file with one")
    num_microbatches: int = option(
        -1,
        "microbatches per step; -1 = stages (twice as many with delayed forwarding)",
        minimum=1,
        derived=True,
    )
    num_repeats: int = option(
        -1,
        "chunks of layers per stage; -1 = num_layers / (stages x num_layers_per_stage)",
        minimum=1,
        derived=True,
    )
    num_layers_per_stage: int = option(
        -1, "layers per chunk; -1 = num_layers / (stages x num_repeats)", minimum=1, derived=True
    )
    layers_per_stage: list[int] = option(  # noqa: RUF009
        [], "uneven chunks: layers of each chunk in model order; overrides the two keys above"
    )
    delay_activation_forwarding: bool = option(
        False, "forward activations a tick later so that transfers overlap with compute"
    )
    overlap_slots: bool = option(False, "a tick of slack between the last stage's forward and its backward")
    skip_idle: str = option(
        "auto", "skip idle slots instead of computing them masked", choices=("auto", "true", "false")
    )
    fsdp_gather: str = option(
        "per_iteration", "how often FSDP weights are gathered", choices=("per_iteration", "once")
    )
    scan_layers_per_stage: bool = option(True, "scan over the layers of a chunk; false = unroll them")
    remat_policy: str = option("full", "what the backward recomputes", variants="maxpipe.pipeline.remat")
