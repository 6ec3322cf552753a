"""Naming slow processes from the seconds of their stages."""

from maxpipe.telemetry.slow_process import STEPS, SlowProcess


def lines(processes, steps):
    """Return (step, line) of what is printed over steps with these seconds of stages."""
    slow = SlowProcess([frozenset(of_stage) for of_stage in processes])
    printed = [(i, slow.after_step(i, seconds)) for i, seconds in enumerate(steps, 1)]
    return [(step, line) for step, line in printed if line]


EVEN, ONE_SLOW = [0.1, 0.1], [0.1, 0.3]


def test_slow_process_is_named_once_after_some_steps_and_again_when_it_is_over():
    steps = [EVEN] * 3 + [ONE_SLOW] * 12 + [EVEN] * 12
    (begin, warning), (end, over) = lines([[0], [1]], steps)
    assert (begin, end) == (3 + STEPS, 15 + STEPS)
    assert warning.startswith(
        f"warning: process 1 is slow: without waiting for others, step {begin} took 0.3 s there "
        "and 0.1 s elsewhere; if the hosts are equally fast, pipeline.layers_per_stage=auto evens "
        "the stages out; otherwise look at that host."
    )
    assert over == f"step {end}: process 1 is no longer slow"


def test_first_step_short_stalls_even_stages_and_milliseconds_are_not_named():
    for steps in (
        [ONE_SLOW] + [ONE_SLOW, EVEN] * STEPS,
        [ONE_SLOW] * STEPS,
        [[0.1, 0.19]] * 2 * STEPS,
        [[0.001, 0.02]] * 2 * STEPS,
    ):
        assert not lines([[0], [1]], steps)


def test_processes_are_compared_by_their_slowest_stage_with_the_median_of_others():
    seconds = [0.1, 0.5, 0.1, 0.1, 0.5, 0.1]
    ((_, line),) = lines([[0], [1], [2], [0], [1], [2]], [seconds] * 2 * STEPS)
    assert "process 1 is slow" in line
    # Two of four are slow, and the others' median is between.
    ((_, line),) = lines([[0], [1], [2], [3]], [[0.1, 0.1, 0.3, 0.9]] * 2 * STEPS)
    assert "process 3 is slow" in line


def test_processes_of_one_stage_are_named_together():
    ((_, line),) = lines([[0, 1], [2, 3]], [ONE_SLOW] * 2 * STEPS)
    assert line.startswith("warning: processes 2, 3 are slow: ")
