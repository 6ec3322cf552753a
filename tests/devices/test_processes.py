"""Values of all processes on the first one, with a store in place of the coordination service."""

import jax
import pytest

from maxpipe.devices import processes


class Store:
    """What is posted, with a count of calls; the missing ones come while one is waited for."""

    def __init__(self):
        self.values, self.later, self.calls = {}, {}, []

    def key_value_set(self, key, value):
        self.values[key] = value

    def key_value_delete(self, key):
        self.calls.append("delete")
        self.values = {k: v for k, v in self.values.items() if not k.startswith(f"{key}/")}

    def key_value_dir_get(self, key):
        self.calls.append("directory")
        return [(k, v) for k, v in self.values.items() if k.startswith(f"{key}/")]

    def blocking_key_value_get(self, key, timeout_in_ms):
        self.calls.append("wait")
        self.values.update(self.later)
        return self.values[key]


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(processes, "coordinator", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 12)
    return store


def gather(monkeypatch, index, number=0):
    monkeypatch.setattr(processes, "_reports", iter([number]))
    monkeypatch.setattr(jax, "process_index", lambda: index)
    return processes.of_all_on_first(f"of {index}")


@pytest.mark.parametrize(
    ("late", "calls"),
    [((), ["directory", "delete"]), ((2, 5, 11), ["directory", "wait", "directory", "delete"])],
)
def test_reports_are_read_at_once_in_order_and_then_deleted(late, calls, store, monkeypatch):
    for index in range(11, 0, -1):
        assert gather(monkeypatch, index) == []
    gather(monkeypatch, 1, number=1)  # of the next call
    (following,) = [key for key in store.values if "/1/" in key]
    store.later = {key: store.values.pop(key) for key in list(store.values) if _index(key) in late}
    assert gather(monkeypatch, 0) == [f"of {index}" for index in range(12)]
    assert store.calls == calls
    assert [*store.values] == [following]


def _index(key):
    return int(key.rpartition("/")[2])
