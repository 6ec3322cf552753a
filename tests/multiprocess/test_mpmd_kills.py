"""SIGKILL of a random process of an mpmd run, at a random moment between its start and its end.

The others end with a documented code within the deadline, and the same command goes on to the bits
of a run that was left alone.
"""

import random
import signal
import time

import pytest
from helpers.runs import assert_same_run, checkpoints
from helpers.training_process import command, ended, ends, members, output_of

STEPS = 120
HEARTBEAT = 10
STARTUP = 90  # for importing JAX and compiling on a busy machine
SLACK = 15
LOST = (134, -signal.SIGABRT)  # this process's own exit, or JAX's; both are 134 in a shell
HUNG = 124  # also of a process that waits for one which was lost before they met
DONE = 0  # the run was over


def words(directory, processes):
    """Return the arguments of a run with a stage in each process, evaluations and saves."""
    return command(
        directory,
        f"mesh.simulated_devices={2 * processes}",
        "mesh.ici.data=1",
        "mesh.ici.fsdp=2",
        f"mesh.ici.stage={processes}",
        "pipeline.schedule=zb_v",
        "pipeline.num_repeats=2",
        f"pipeline.num_microbatches={processes}",
        f"model.num_layers={2 * processes}",
        "model.tie_embeddings=True",
        "model.dropout=0.1",
        f"steps={STEPS}",
        "checkpoint.every=10",
        "eval.every=15",
        "eval.batches=2",
        f"mesh.heartbeat_timeout_seconds={HEARTBEAT}",
        f"telemetry.startup_deadline_seconds={STARTUP}",
        f"telemetry.step_deadline_seconds={2 * HEARTBEAT}",
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of a run of some processes without a kill, and its seconds by part."""
    finished = {}

    def run(processes):
        if processes not in finished:
            directory = tmp_path_factory.mktemp(f"whole{processes}")
            began = time.monotonic()
            with members(directory, processes, words(directory, processes)) as started:
                started[0].wait_for("step   1/")
                stepping = time.monotonic()
                ended(started, [0] * processes)
            finished[processes] = directory, stepping - began, time.monotonic() - stepping
        return finished[processes]

    return run


@pytest.mark.parametrize(
    ("processes", "seed"),
    [
        pytest.param(2, 0, marks=pytest.mark.slow),
        *(pytest.param(2, seed, marks=pytest.mark.grid) for seed in range(1, 16)),
        *(pytest.param(4, seed, marks=pytest.mark.grid) for seed in range(5)),
    ],
)
def test_train_random_process_killed_at_random_moment_ends_others_and_loses_no_bit(
    tmp_path, whole, processes, seed
):
    undisturbed, start_seconds, step_seconds = whole(processes)
    draw = random.Random(1000 * processes + seed)
    victim = draw.randrange(processes)
    # A third of the kills is before the first step.
    is_stepping = draw.random() > 1 / 3
    # The machine may be quicker now than when nobody was killed.
    delay = 0.8 * draw.random() * (step_seconds if is_stepping else start_seconds)
    print(f"seed {seed}: process {victim} of {processes}, {delay:.2f} s after ", end="")
    print("step 1" if is_stepping else "the start", end="; ")
    with members(tmp_path, processes, words(tmp_path, processes), "killed") as started:
        if is_stepping:
            started[0].wait_for("step   1/")
        time.sleep(delay)
        started[victim].send(signal.SIGKILL)
        killed_at = time.monotonic()
        codes, output = ends(started)
        seconds = time.monotonic() - killed_at
        has_stepped = "step   1/" in started[0].output
    saved = checkpoints(tmp_path / "base")
    print(f"codes {codes} after {seconds:.1f} s; saved {saved[-1:]}")
    assert {code for i, code in enumerate(codes) if i != victim} <= {HUNG, DONE, *LOST}, output
    assert seconds < (2 * HEARTBEAT if has_stepped else STARTUP) + SLACK, output
    output_of(tmp_path, words(tmp_path, processes), [0] * processes, "again")
    assert_same_run(undisturbed / "base", tmp_path / "base", STEPS)
