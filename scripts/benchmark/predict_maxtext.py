"""Predict the step of the same model in MaxText and in maxpipe, on TPUs and without a chip.

    python scripts/benchmark/predict_maxtext.py PYTHON
        [--case interleaved four_repeats eight_stages fsdp experts_fsdp experts_expert]

PYTHON is a Python 3.12 with MaxText, made as `compare_maxtext.py` says. It compiles both programs,
so that JAX and libtpu are the same, and both are walked by `maxpipe.compile.prediction`: the
compiler's cycles, transfers by bytes and links, attention kernels by FLOPs. No flags are set for
either. The model has 16 layers, embed 2048, 16 heads of 128, MLP 8192, 32000 tokens of vocabulary;
a step has 32 sequences of 2048 tokens on a v5p:2x2x2, bfloat16, full rematerialisation. With
experts there are 8 layers, each a mixture of 8 of MLP 4096, of which a token takes 2. Ratios are
maxpipe over MaxText. Exit code 1 means that something could not be predicted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare_maxtext import (
    MIB,
    ROOT,
    Failed,
    Peer,
    environment,
    find_peer,
    maxpipe_command,
    maxtext_command,
)
from predict import PARTS, basis

TOPOLOGY = "v5p:2x2x2"  # which MaxText calls v5p-16
MAXTEXT_MODEL = (
    "base_emb_dim=2048",
    "base_num_query_heads=16",
    "base_num_kv_heads=16",
    "head_dim=128",
    "base_mlp_dim=8192",
    "base_num_decoder_layers=16",
    "vocab_size=32000",
    "max_target_length=2048",
    "per_device_batch_size=4",
    "dtype=bfloat16",
    "weight_dtype=float32",
    "compile_topology=v5p-16",
    "compile_topology_num_slices=1",
)
MAXPIPE_MODEL = (
    "model.embed_dim=2048",
    "model.num_query_heads=16",
    "model.num_kv_heads=16",
    "model.head_dim=128",
    "model.mlp_dim=8192",
    "model.num_layers=16",
    "model.vocab_size=32000",
    "data.sequence_length=2048",
    "data.global_batch_size=32",
    "model.dtype=bfloat16",
    f"compile.topology={TOPOLOGY}",
)
MAXTEXT_PIPELINE = (
    "ici_pipeline_parallelism=4",
    "ici_fsdp_parallelism=2",
    "num_pipeline_microbatches=8",
)
MAXPIPE_PIPELINE = ("mesh.ici.stage=4", "mesh.ici.fsdp=2", "pipeline.num_microbatches=8")


class Case(NamedTuple):
    """Arguments of each configuration by its label; all are compared with MaxText's first."""

    maxtext: dict[str, tuple[str, ...]]
    maxpipe: dict[str, tuple[str, ...]]


THEIRS = {"MaxText": (), "MaxText, ag_once": ("pipeline_fsdp_ag_once=true",)}
# MaxText takes it with one layer on each stage.
PER_REPEAT = {"MaxText, ag_per_repeat": ("pipeline_fsdp_ag_per_repeat=true",)}


def pipelined(repeats: int, labels: dict[str, tuple[str, ...]]) -> Case:
    """Return a case of four stages, 16 layers in so many repeats."""
    layers = 16 // (4 * repeats)
    theirs = (f"num_layers_per_pipeline_stage={layers}", f"num_pipeline_repeats={repeats}")
    ours = (*MAXPIPE_PIPELINE, f"pipeline.num_repeats={repeats}")
    labels_of_theirs = THEIRS | (PER_REPEAT if layers == 1 else {})
    return Case(
        {name: (*MAXTEXT_PIPELINE, *theirs, *words) for name, words in labels_of_theirs.items()},
        {name: (*ours, *words) for name, words in labels.items()},
    )


MAXTEXT_EIGHT = (
    "ici_pipeline_parallelism=8",
    "num_pipeline_microbatches=32",
    "num_layers_per_pipeline_stage=1",
    "num_pipeline_repeats=2",
)
MAXPIPE_EIGHT = (
    "mesh.ici.stage=8",
    "mesh.ici.fsdp=1",
    "pipeline.num_microbatches=32",
    "pipeline.num_repeats=2",
)
LOCKSTEP, CIRCULAR = ("pipeline.schedule=lockstep_1f1b",), ("pipeline.schedule=circular",)
MAXTEXT_FSDP = ("ici_fsdp_parallelism=8",)
MAXTEXT_EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=8",
    "num_experts_per_tok=2",
    "base_mlp_dim=4096",
    "base_moe_mlp_dim=4096",
    "base_num_decoder_layers=8",
)
MAXPIPE_EXPERTS = (
    "model.moe.experts=8",
    "model.moe.per_token=2",
    "model.moe.mlp_dim=4096",
    "model.num_layers=8",
)
MAXPIPE_FSDP = ("mesh.ici.stage=1", "mesh.ici.fsdp=8", "pipeline.num_repeats=1")
EACH = "pipeline.fsdp_gather=per_iteration"
OURS = {
    "lockstep_1f1b": LOCKSTEP,
    "lockstep_1f1b, per_iteration": (*LOCKSTEP, EACH),
    "lockstep_1f1b, save_dot_except_mlp": (
        *LOCKSTEP,
        "pipeline.remat_policy=save_dot_except_mlp",
    ),
    "lockstep_1f1b, minimal": (*LOCKSTEP, "pipeline.remat_policy=minimal"),
    "circular": CIRCULAR,
    "circular, per_iteration": (*CIRCULAR, EACH),
}
CASES = {
    "interleaved": pipelined(2, OURS),
    "four_repeats": pipelined(4, OURS),
    "eight_stages": Case(
        {"MaxText": MAXTEXT_EIGHT},
        {"lockstep_1f1b": (*MAXPIPE_EIGHT, *LOCKSTEP)},
    ),
    "fsdp": Case(
        {
            "MaxText": MAXTEXT_FSDP,
            "MaxText, minimal, unrolled": (
                *MAXTEXT_FSDP,
                "remat_policy=minimal",
                "scan_layers=false",
            ),
        },
        {
            "sequential": MAXPIPE_FSDP,
            "sequential, minimal": (*MAXPIPE_FSDP, "pipeline.remat_policy=minimal"),
            "sequential, save_dot_except_mlp, unrolled": (
                *MAXPIPE_FSDP,
                "pipeline.remat_policy=save_dot_except_mlp",
                "pipeline.scan_layers=false",
            ),
            "sequential, minimal, unrolled": (
                *MAXPIPE_FSDP,
                "pipeline.remat_policy=minimal",
                "pipeline.scan_layers=false",
            ),
            "sequential, none, unrolled": (
                *MAXPIPE_FSDP,
                "pipeline.remat_policy=none",
                "pipeline.scan_layers=false",
            ),
        },
    ),
    "experts_fsdp": Case(
        {"MaxText": (*MAXTEXT_FSDP, *MAXTEXT_EXPERTS)},
        {"sequential": (*MAXPIPE_FSDP, *MAXPIPE_EXPERTS)},
    ),
    "experts_expert": Case(
        {
            "MaxText": (
                "ici_fsdp_parallelism=2",
                "ici_expert_parallelism=4",
                *MAXTEXT_EXPERTS,
            )
        },
        {
            "sequential": (
                *MAXPIPE_FSDP,
                "mesh.ici.fsdp=2",
                "mesh.ici.expert=4",
                *MAXPIPE_EXPERTS,
            )
        },
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table with a row as soon as its program is predicted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", metavar="PYTHON", help="a Python with maxtext")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES)
    options = parser.parse_args(argv)
    try:
        peer = find_peer(options.python)
        header = ("case", "program", "step s", *PARTS, "temp MiB", "of MaxText")
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
        bases = {compare(peer, name) for name in options.case}
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items() if version)
    print(f"\non both sides: {versions}\npredicted by {'; '.join(sorted(bases))}")
    return 0


def compare(peer: Peer, name: str) -> str:
    """Print the rows of a case; return what their predictions rest on.

    Raises:
      Failed: a program could not be compiled or predicted.
    """
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        reference: dict[str, Any] = {}
        for label, words in case.maxtext.items():
            theirs = maxtext_command(peer, "train_compile", directory, (*MAXTEXT_MODEL, *words))
            # The same command, run inside a program that walks what it compiles.
            inside = [peer.python, __file__, "--inside", str(file), *theirs[2:]]
            content = report("maxtext", inside, file)
            reference = reference or content
            print_row(name, label, content, reference)
        for label, words in case.maxpipe.items():
            ours = maxpipe_command(peer.python, "compile", directory, (*MAXPIPE_MODEL, *words))
            print_row(name, label, report("maxpipe", [*ours, "--json", str(file)], file), reference)
    return basis(reference["predicted"], crosses_slices=False)


def report(trainer: str, command: Sequence[str], file: Path) -> dict[str, Any]:
    """Run a command that compiles, and return the report that it writes.

    Raises:
      Failed: it ended with an error, or without a prediction.
    """
    file.unlink(missing_ok=True)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(trainer) | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if not file.exists():
        raise Failed(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if content["predicted_step_seconds"] is None:
        raise Failed(f"{' '.join(command)}: no prediction: {content['predicted']['unknown']}")
    return content


def print_row(case: str, program: str, content: dict[str, Any], reference: dict[str, Any]) -> None:
    seconds, parts = content["predicted_step_seconds"], content["predicted"]["parts"]
    cells = [
        case,
        program,
        f"{seconds:.4g}",
        *(f"{parts[part]:.3g}" for part in PARTS),
        f"{content['memory']['temp_bytes'] / MIB:.0f}",
        f"{seconds / reference['predicted_step_seconds']:.3f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def mesh_of(compiled: Any) -> Any:
    """Return the mesh that a program was compiled for."""
    import jax

    shardings = jax.tree.leaves(compiled.input_shardings)
    return next(s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding))


def compile_inside(file: Path, module: str, arguments: Sequence[str]) -> None:
    """Run MaxText's command that compiles, and write a report like that of `maxpipe.compile`.

    The step is the longest of the programs that the command compiles.
    """
    import importlib

    import jax

    from maxpipe.compile.prediction.predict import basis_of, prediction_of, time_program
    from maxpipe.compile.step import memory_of
    from maxpipe.devices.chips import chip_of

    compile_step = jax.stages.Lowered.compile
    longest = -1.0

    def compile_and_walk(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal longest
        compiled = compile_step(self, *args, **kwargs)
        mesh = mesh_of(compiled)
        chip = chip_of(TOPOLOGY)
        base = basis_of(mesh, chip)
        timeline = time_program(compiled.as_text(), mesh, chip, base)
        if timeline.seconds <= longest:
            return compiled
        longest, prediction = timeline.seconds, prediction_of(timeline, base)
        content = {
            "predicted_step_seconds": prediction.seconds,
            "predicted": prediction.as_json(),
            "memory": {"temp_bytes": memory_of(compiled, mesh).temp},
        }
        file.write_text(json.dumps(content), encoding="utf-8")
        return compiled

    jax.stages.Lowered.compile = compile_and_walk
    importlib.import_module(module).main([module, *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        compile_inside(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
