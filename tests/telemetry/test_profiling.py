from functools import partial

import jax
import pytest

from maxpipe.telemetry.profiling import STEPS, Profiler, SlowProcess
from maxpipe.telemetry.writers import TelemetryError


def test_profiler_traces_exactly_steps_of_window(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    for window, steps, expected in [
        ([3, 4], range(1, 7), [1, 2, "start", 3, 4, "stop", 5, 6]),
        ([2, 2], range(1, 4), [1, "start", 2, "stop", 3]),
        ([2, 5], range(1, 4), [1, "start", 2, 3, "stop"]),
        ([2, 5], range(4, 8), ["start", 4, 5, "stop", 6, 7]),
        ([2, 3], range(4, 6), [4, 5]),
        ([], range(1, 3), [1, 2]),
    ]:
        assert traced(calls, Profiler(window, tmp_path), steps) == expected
    # Asked for before the first step, before a step, during a trace, and just before the window.
    for asked, window, expected in [
        ([1], [], ["start", 1, 2, "stop", 3, 4, 5]),
        ([3], [], [1, 2, "start", 3, 4, "stop", 5]),
        ([3, 4], [], [1, 2, "start", 3, 4, "stop", 5]),
        ([2], [3, 4], [1, "start", 2, 3, "stop", "start", 4, "stop", 5]),
        ([5], [], [1, 2, 3, 4, "start", 5, "stop"]),
    ]:
        requests = iter([step in asked for step in range(1, 6)])
        profiler = Profiler(
            window, tmp_path, steps_on_request=2, take_request=partial(next, requests)
        )
        assert traced(calls, profiler, range(1, 6)) == expected


def traced(calls, profiler, steps):
    calls.clear()
    for step in steps:
        profiler.before(step)
        calls.append(step)
        profiler.after(step)
    profiler.close()
    return calls


def test_profiler_trace_names_the_viewer_and_its_failure_ends_nothing(tmp_path, monkeypatch):
    said = []
    profiler = Profiler([1, 1], tmp_path, print_line=said.append)
    profiler.before(1)
    profiler.after(1)
    assert f"tensorboard --logdir {tmp_path}" in said[0]
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))

    def fail():
        jax.profiler.original()
        raise OSError("No space left on device")

    monkeypatch.setattr(jax.profiler, "original", jax.profiler.stop_trace, raising=False)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    profiler = Profiler([1, 2], tmp_path, print_line=said.append)
    profiler.before(1)
    profiler.close()
    profiler.before(2)
    assert said[1].startswith(f"warning: profiler trace in {tmp_path} cannot be written: No space")
    assert len(said) == 2
    profiler = Profiler([1, 2], tmp_path, is_required=True)
    profiler.before(1)
    with pytest.raises(TelemetryError, match="No space left on device"):
        profiler.close()


def lines(processes, steps):
    slow = SlowProcess([frozenset(of_stage) for of_stage in processes])
    printed = [(i, slow.after_step(i, seconds)) for i, seconds in enumerate(steps, 1)]
    return [(step, line) for step, line in printed if line]


EVEN, ONE_SLOW = [0.1, 0.1], [0.1, 0.3]


def test_slow_process_is_named_once_after_some_steps_and_again_only_after_it_was_over():
    steps = [EVEN] * 3 + [ONE_SLOW] * 12 + [EVEN] * 12 + [ONE_SLOW] * 12
    (begin, warning), (again, _) = lines([[0], [1]], steps)
    assert (begin, again) == (3 + STEPS, 27 + STEPS)
    assert warning.startswith(
        f"warning: process 1 is slow: without waiting for others, step {begin} took 0.3 s there "
        "and 0.1 s elsewhere; if the hosts are equally fast, pipeline.layers_per_stage=auto evens "
        "the stages out; otherwise look at that host."
    )


def test_short_stalls_even_stages_and_milliseconds_are_not_named():
    for steps in (
        [ONE_SLOW] + [ONE_SLOW, EVEN] * STEPS,
        [ONE_SLOW] * (STEPS - 1),
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
