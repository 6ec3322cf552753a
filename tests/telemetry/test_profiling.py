import jax
import pytest

from maxpipe.telemetry.profiling import Profiler
from maxpipe.telemetry.sink import TelemetryError


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: made.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


def run(calls, window, steps, tmp_path):
    calls.clear()
    profiler = Profiler(window, tmp_path)
    for step in steps:
        profiler.before(step)
        calls.append(step)
        profiler.after(step)
    profiler.close()
    return calls


def test_profiler_traces_exactly_steps_of_window(calls, tmp_path):
    for window, steps, expected in [
        ([3, 4], range(1, 7), [1, 2, "start", 3, 4, "stop", 5, 6]),
        ([2, 2], range(1, 4), [1, "start", 2, "stop", 3]),
        ([2, 5], range(1, 4), [1, "start", 2, 3, "stop"]),
        ([2, 5], range(4, 8), ["start", 4, 5, "stop", 6, 7]),
        ([2, 3], range(4, 6), [4, 5]),
        ([], range(1, 3), [1, 2]),
    ]:
        assert run(calls, window, steps, tmp_path) == expected


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
    assert "warning: profiler trace cannot be written" in said[1]
    assert len(said) == 2
    profiler = Profiler([1, 2], tmp_path, is_required=True)
    profiler.before(1)
    with pytest.raises(TelemetryError, match="No space left on device"):
        profiler.close()
