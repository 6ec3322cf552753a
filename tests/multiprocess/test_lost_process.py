"""One of several processes dies or hangs: all others end, with stacks and the documented code."""

import random
import signal
import time

import pytest
from helpers.training_process import ONE_LAYER, command, members

DEADLINE = 8
LOST = (134, -signal.SIGABRT)  # this process's own exit, or JAX's; both are 134 in a shell
QUICK = 10  # seconds from the first word of a hang to the last exit
SLACK = 30  # to that word, on a busy machine

PATIENT_FOR_A_MOMENT = """
import sys
from maxpipe import train
from maxpipe.supervise import process

process._HURRIED_SECONDS = 3.0
sys.exit(train.main(sys.argv[1:]))
"""


def words(directory, processes, *more):
    mesh = (f"mesh.simulated_devices={processes}", f"mesh.ici.data={processes}")
    waits = ("mesh.heartbeat_timeout_seconds=600", f"telemetry.step_deadline_seconds={DEADLINE}")
    return command(
        directory, "steps=100000", "checkpoint.every=0", *mesh, *ONE_LAYER, *waits, *more
    )


def codes_after_a_hang(processes, seconds):
    began = time.monotonic()
    while not any("\nhung" in process.output for process in processes):
        assert time.monotonic() - began < seconds, [process.output for process in processes]
        if all(process.has_ended for process in processes):
            break
        time.sleep(0.02)
    said = time.monotonic()
    codes = [process.wait() for process in processes]
    assert time.monotonic() - said < QUICK
    return codes


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_train_one_of_two_is_stopped_the_other_ends_with_124_and_stacks(tmp_path, victim):
    with members(tmp_path, 2, words(tmp_path, 2)) as started:
        started[0].wait_for("step      2/")
        started[victim].send(signal.SIGSTOP)
        (code,) = codes_after_a_hang([started[1 - victim]], DEADLINE + SLACK)
        assert code in (124, *(LOST if victim else ()))
        assert "stacks of all threads follow" in started[1 - victim].output
        # It cannot end before it goes on; then it finds its own deadline expired, or JAX's word.
        started[victim].send(signal.SIGCONT)
        assert started[victim].wait() in (124, *LOST)


@pytest.mark.slow
@pytest.mark.parametrize(
    "doing",
    [(), ("checkpoint.every=1",), ("eval.every=1", "eval.batches=20")],
    ids=["step", "save", "evaluation"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_train_one_of_four_is_lost_at_a_random_moment_the_others_end(tmp_path, number, doing):
    seed = random.randrange(1000)
    draw = random.Random(seed)
    victim = draw.randrange(4)
    with members(tmp_path, 4, words(tmp_path, 4, *doing)) as started:
        started[0].wait_for("step      2/")
        time.sleep(draw.uniform(0, 1))
        started[victim].send(number)
        others = [process for process in started if process is not started[victim]]
        codes = codes_after_a_hang(others, DEADLINE + SLACK)
    assert {*codes} <= {124, *LOST}, f"seed {seed}: {codes}"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_train_sigterm_to_a_process_whose_peer_is_stopped_ends_it(tmp_path, victim):
    patient = words(tmp_path, 2, "telemetry.step_deadline_seconds=0")
    with members(tmp_path, 2, patient, program=PATIENT_FOR_A_MOMENT) as started:
        started[0].wait_for("step      2/")
        started[victim].send(signal.SIGSTOP)
        time.sleep(1)
        started[1 - victim].send(signal.SIGTERM)
        assert codes_after_a_hang([started[1 - victim]], SLACK) == [124]
        assert "(asked to stop); stacks of all threads follow" in started[1 - victim].output


@pytest.mark.slow
def test_train_sigterm_to_one_process_before_the_first_step_ends_all_with_75(tmp_path):
    with members(tmp_path, 2, words(tmp_path, 2)) as started:
        started[0].wait_for("compiling   the first step")
        started[1].send(signal.SIGTERM)
        assert [process.wait() for process in started] == [75, 75]
    assert "stopped in process 1: SIGTERM before the first step" in started[0].output
