"""Compare the plan's closed forms with the compiler, on candidates drawn at random.

    python scripts/benchmark/plan_accuracy.py CONFIG --topology v5p:2x2x2 --count 12 --seed 1 \
        [key=value ...]

Every drawn candidate is compiled by maxpipe.compile in a process of its own, one after another, and
none is dropped. A line is printed for each as it ends; then the errors of memory and the rank
correlation of time.
"""

import argparse
import random
from pathlib import Path

import numpy as np

from maxpipe.compiling.compile_process import compile_configuration
from maxpipe.config import load
from maxpipe.config.printing import to_yaml
from maxpipe.devices.chips import GIB
from maxpipe.planning.search.block import block_of
from maxpipe.planning.search.candidate import Candidate, candidate_of
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.request import Request, shared_config
from maxpipe.planning.search.search import Outcome, price


def drawn(request: Request, count: int, seed: int) -> list[Candidate]:
    """Return legal candidates of different meshes, engines and schedules, drawn at random."""
    space, machine = request.space(), request.machine
    legality, facts = Legality(request.config, machine.hosts), Facts(request.config)
    batch, draw = request.batches[0], random.Random(seed)
    kinds: dict[tuple[str, str], list[Candidate]] = {}
    for grid in space.grids():
        if legality.of_mesh(grid):
            continue
        for engine, schedule in space.pipelines(grid.size("stage")):
            block = block_of(space, legality, grid, engine, schedule, batch)
            if legality.of_engine(engine):
                continue
            if priced := price(block, legality, facts, machine, Outcome().fallen):
                index = draw.choice(np.flatnonzero(priced.legal).tolist())
                candidate = candidate_of(priced.block, index, priced.memory, priced.seconds, facts)
                kinds.setdefault((engine, schedule), []).append(candidate)
    # As many of each engine and schedule, in turn.
    chosen: list[Candidate] = []
    while len(chosen) < count and kinds:
        for key in [*kinds]:
            pool = kinds[key]
            chosen.append(pool.pop(draw.randrange(len(pool))))
            if not pool:
                del kinds[key]
    return chosen[:count]


def ranks(values: list[float]) -> np.ndarray:
    """Return the rank of each value."""
    return np.argsort(np.argsort(values)).astype(float)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="directory for the configurations")
    flags = parser.parse_intermixed_args()
    written = load(flags.config, flags.overrides).config
    machine = machine_of(flags.topology, 1, written)
    shared = shared_config(written, machine)
    batch = written.data.global_batch_size
    request = Request(flags.config, written, shared, machine, (batch,), {}, 0.0)
    print(f"seed {flags.seed}, {flags.topology}, {flags.config} {' '.join(flags.overrides)}")
    print("| candidate | GiB, closed | GiB, compiled | s, closed | s, compiled |")
    print("|---|---|---|---|---|")
    pairs = []
    for number, candidate in enumerate(drawn(request, flags.count, flags.seed)):
        text = to_yaml(candidate.config(shared))
        if flags.keep:
            (flags.keep / f"{number}.yml").write_text(text, encoding="utf-8")
        proof = compile_configuration(text, lambda line: None)
        name = (
            f"{candidate.mesh_text()} {candidate.schedule_text()} M={candidate.microbatches} "
            f"V={candidate.repeats} {candidate.policy} {candidate.gather} t={candidate.tiles}"
        )
        closed = float(candidate.seconds.step)
        memory = "-" if proof.memory is None else f"{proof.memory / GIB:.2f}"
        seconds = proof.failure[:80] if proof.seconds is None else f"{proof.seconds:.4f}"
        print(
            f"| {name} | {candidate.memory / GIB:.2f} | {memory} | {closed:.4f} | {seconds} |",
            flush=True,
        )
        if proof.memory is not None and proof.seconds is not None:
            pairs.append((candidate.memory, proof.memory, closed, proof.seconds))
    closed_memory, memory, closed_seconds, seconds = (
        list(values) for values in zip(*pairs, strict=True)
    )
    errors = np.array(closed_memory) / memory - 1
    print(f"\n{len(pairs)} of {flags.count} have a predicted step")
    print(f"memory: {errors.mean():+.1%} on average, {errors.min():+.1%} to {errors.max():+.1%}")
    ratios = np.array(closed_seconds) / seconds
    print(f"time: closed / compiled {ratios.min():.2f} to {ratios.max():.2f}")
    rank = np.corrcoef(ranks(closed_seconds), ranks(seconds))[0, 1]
    print(f"Spearman of time: {rank:.2f}; slowest / fastest {max(seconds) / min(seconds):.2f}")


if __name__ == "__main__":
    main()
