"""Batches that grow and mixtures that change: what is read, exact resume, equal on all engines."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.runs import assert_same_run, losses, rows, saved, train
from helpers.training_process import BASE, TINY

from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config import Config, load, replace, resolve
from maxpipe.data.documents import Encoded
from maxpipe.data.loader import initial_state, make_loader
from maxpipe.data.rows import DocumentOrder, Era, MixedOrder, RowStream, shares
from maxpipe.training.phases import ERAS, begin_phase, config_after, dealt, first_unread

SIZES = [4000, 6000, 5000]
FIRSTS = [0, 4000, 10000]
# Weights, rows, and turns of all rows.
PHASES = [
    ((1, 2.5, 0.5), 4, 300),
    ((1, 1, 2), 4, 300),  # other weights
    ((1, 1, 2), 8, 150),  # more rows
    ((0, 1, 1), 24, 50),  # both
    ((3, 1, 0), 24, 50),
    ((1, 2, 3), 24, 1),  # some rows are still in the document of the phase before
    ((1, 1, 1), 24, 300),
]


def num_pairs(index):
    return 2 + index * 7919 % 5 + 20 * (index % 20 == 0)


class Documents:
    """Documents of `num_pairs` pairs of their index."""

    def __getitem__(self, index):
        length = 1 + num_pairs(index)
        return Encoded(np.full(length, index, np.int32), np.ones(length, np.float32))


def read(order, position, count):
    """Return what `count` turns of all rows read, and the position after them."""
    streams = [RowStream(Documents(), order, len(position), row) for row in position]
    pairs = [stream.take(3) for _ in range(count) for stream in streams]
    return pairs, np.array([stream.state for stream in streams])


def test_no_document_is_left_out_or_read_twice_where_rows_and_weights_change():
    num_documents, eras = sum(SIZES), []
    lengths = num_pairs(np.arange(num_documents))
    targets, last = np.zeros(num_documents, int), []
    position = initial_state(range(4), num_documents)
    for weights, size, turns in PHASES:
        if weights != (eras[-1].weights if eras else PHASES[0][0]):
            eras.append(Era(weights, first_unread(position, num_documents, eras).tolist()))
        if len(position) < size:
            position = dealt(position, size, num_documents)
        last = [part.nonzero()[0].max() + 1 for part in np.split(targets, FIRSTS[1:]) if part.any()]
        draws = [Era(shares(era.weights), era.unread) for era in eras]
        orders = [DocumentOrder(size, 0, shuffle=False) for size in SIZES]
        order = MixedOrder(orders, shares(PHASES[0][0]), 0, draws)
        pairs, position = read(order, position, turns)
        # The weights hold at once, but for the documents that rows were in.
        begun = [*dict.fromkeys(pair.targets[0] for pair in pairs[8 * size :])]
        drawn = np.bincount(np.searchsorted(FIRSTS, begun, side="right") - 1, minlength=3)
        np.testing.assert_allclose(drawn, np.array(weights) / sum(weights) * sum(drawn), atol=30)
        for pair in pairs:
            np.add.at(targets, pair.targets, 1)
        assert (targets <= lengths).all(), "a document was read twice"
    for first, count in zip(FIRSTS, last, strict=True):
        read_before = slice(first, first + count)  # by the fastest row, when the last phase began
        np.testing.assert_array_equal(targets[read_before], lengths[read_before])


MIXTURE = "data.mixture=[{source: python_stdlib, weight: 1}, {source: synthetic, weight: 0}]"
RUN = [
    *(str(BASE), *TINY, MIXTURE, "data.mixture_changes=[[3, 1, 9]]"),
    *("data.batch_ramp=[[0, 8], [2, 16]]", "data.global_batch_size=16", "steps=5"),
    *("mesh.simulated_devices=0", "model.num_layers=4", "checkpoint.every=1", "checkpoint.keep=9"),
    "telemetry.batch_digest=true",
]
ENGINES = {
    "sequential": ["mesh.ici.data=8", "mesh.ici.stage=1", "mesh.ici.fsdp=1"],
    "circular": ["mesh.ici.data=4", "mesh.ici.fsdp=1", "pipeline.schedule=circular"],
    "scheduled": ["mesh.ici.data=4", "mesh.ici.fsdp=1", "pipeline.schedule=lockstep_1f1b"],
    "mpmd": ["mesh.ici.fsdp=4", "pipeline.schedule=interleaved_1f1b"],
}


@pytest.fixture
def start(tmp_path):
    """start(name, engine, *words) -> directory of the run and what it printed."""

    def _start(name, engine="sequential", *words, code=0):
        own = [*ENGINES[engine], f"pipeline.engine={engine}", f"output_dir={tmp_path / name}"]
        return tmp_path / name / "base", train([*RUN, *own, *words], code)

    return _start


def test_run_stopped_next_to_each_change_resumes_with_the_same_bits(start):
    whole, printed = start("whole")
    assert "data.batch_ramp: 8 after step 0, 16 after step 2; figures here" in printed
    assert "data        1 python_stdlib + 0 synthetic, after step 3 0.1 python_stdlib" in printed
    assert "step 2: 16 sequences a step of 1 python_stdlib + 0 synthetic from here on" in printed
    assert "step 3: 16 sequences a step of 0.1 python_stdlib + 0.9 synthetic from here" in printed
    for step in (1, 2, 3, 4, 5):
        stopped, _ = start("stopped", "sequential", f"stop_after={step}")
    assert_same_run(stopped, whole, 5)
    digests = [[r["batch_digest"] for r in rows(run) if "loss" in r] for run in (stopped, whole)]
    assert digests[0] == digests[1]
    assert [len(saved(whole, step)["iterator"]) for step in (1, 2, 3)] == [8, 8, 16]
    grown, _ = start(
        "grown", "sequential", "data.batch_ramp=[]", "data.global_batch_size=8", "stop_after=2"
    )
    start("grown", "sequential", code=2)
    start("grown", "sequential", "checkpoint.accept_changes=[data]")
    assert_same_run(grown, whole, 5)
    # A run may get changes later, and those of steps that are over hold at once.
    words = "data.mixture_changes=[[2, 9, 1]]", "checkpoint.accept_changes=[data]", "steps=6"
    root, _ = start("whole", "sequential", *words)
    eras = StepsDirectory(root / "checkpoints").record(6).meta[ERAS]
    assert [weights for weights, _ in eras] == [[1, 9], [9, 1]]
    words = *words[:2], "data.batch_ramp=[[0, 8], [9, 16]]", "steps=7"
    _, printed = start("whole", "sequential", *words, code=2)
    assert "has 8 sequences after step 6, where the checkpoint has 16: give a multiple" in printed
    words = *words[:1], "data.batch_ramp=[[0, 16], [4, 32]]", "data.global_batch_size=32", "steps=7"
    _, printed = start("whole", "sequential", "checkpoint.accept_changes=[data]", *words, code=2)
    assert "has 32 sequences before step 6, up to which the run has 16: write [6, 32]" in printed


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("circular", "scheduled")]


@pytest.mark.parametrize("engine", ["mpmd", *SLOW])
def test_batches_grow_alike_on_another_engine_that_continues_the_run(start, engine):
    root, _ = start("sequential", "sequential", "steps=3")
    start(engine, "sequential", "steps=3", "stop_after=1")
    other, _ = start(engine, engine, "steps=3")
    assert sorted(losses(other)) == [1, 2, 3]
    for step, figures in losses(other).items():
        np.testing.assert_allclose(figures, losses(root)[step], rtol=1e-5)


def test_smaller_batches_keep_microbatches_of_pipelines_as_far_as_they_divide():
    sizes = "data.batch_ramp=[[0, 4], [1, 12], [2, 24]]", "data.global_batch_size=24"
    counts = {
        "mesh.ici.stage=1 mesh.ici.data=2 pipeline.num_microbatches=6": [1, 3, 6],
        "pipeline.num_microbatches=6": [2, 6, 6],
        "pipeline.num_microbatches=4 pipeline.schedule=circular": [2, 2, 4],
    }
    for words, expected in counts.items():
        config = resolve(load(str(BASE), [*sizes, "mesh.ici.fsdp=2", *words.split()]), 4)
        found = [config_after(config, step).pipeline.num_microbatches for step in range(3)]
        assert found == expected, words
    assert [config.data.sequences(steps) for steps in range(5)] == [0, 4, 16, 40, 64]


def test_documents_skipped_in_several_phases_are_named_once_and_counted_at_the_end(tmp_path, capfd):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\nbad\n{"text": "b"}\n')
    keys = {"source": "jsonl", "path": str(file), "eval_fraction": 0.0, "on_bad_document": "skip"}
    keys |= {"global_batch_size": 2, "sequence_length": 8}
    config = replace(Config(), **{f"data.{key}": value for key, value in keys.items()})
    run = SimpleNamespace(
        config=config, step=0, meta={}, loader=make_loader(config, "train", [0, 1])
    )
    run.place = SimpleNamespace(rows=[0, 1], num_rows=2)
    run.recorder = SimpleNamespace(print_line=lambda line: None)
    for run.step in (20, 40):
        for _ in range(20):
            next(run.loader)
        begin_phase(None, None, run)
    run.loader.close()
    said = capfd.readouterr().err
    assert said.count("not a JSON object") == said.count("1 of 3 documents were skipped") == 1
