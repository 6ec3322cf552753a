"""What processes compare before the first step, with a store in place of the other processes."""

import threading
from pathlib import Path

import pytest

import maxpipe
from maxpipe.config import Config, ConfigError, replace
from maxpipe.devices import agreement, processes
from maxpipe.devices.agreement import check_agreement, source_digest


@pytest.fixture
def together(monkeypatch):
    """Return a function that calls `check_agreement` in a thread per process -> their problems."""

    def run(*arguments):
        values, changed, this = {}, threading.Condition(), threading.local()

        def post(key, value):
            with changed:
                assert values.setdefault(key, value) is value
                changed.notify_all()

        def read(key):
            with changed:
                assert changed.wait_for(lambda: key in values, 60)
                return values[key]

        class CallsOfThread:
            """The number of the next call: each process counts its own."""

            def __next__(self):
                this.calls = getattr(this, "calls", -1) + 1
                return this.calls

        monkeypatch.setattr(agreement, "_calls", CallsOfThread())
        fakes = {"count": lambda: len(arguments), "index": lambda: this.index}
        for name, fake in (fakes | {"post": post, "read": read}).items():
            monkeypatch.setattr(processes, name, fake)
        problems = [None] * len(arguments)

        def member(index):
            this.index = index
            try:
                check_agreement(*arguments[index])
                problems[index] = {}
            except ConfigError as error:
                problems[index] = {problem.key: problem.message for problem in error.problems}

        threads = [threading.Thread(target=member, args=(i,)) for i in range(len(arguments))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return problems

    return run


def test_agreement_names_every_difference_in_every_process(together):
    other = replace(Config(), **{"optimizer.learning_rate": 0.5, "model.mlp_dim": 7})
    same = (Config(), {"version of jax": "1"})
    found = together(same, (other, {"version of jax": "2"}), same, (Config(), {}))
    assert found == [found[0]] * 4
    said = found[0]
    assert set(said) == {"optimizer.learning_rate", "model.mlp_dim", "version of jax"}
    shown = "differ: 1 in processes 0, 2; 2 in process 1; missing in process 3;"
    assert shown in said["version of jax"]
    rate = Config().optimizer.learning_rate
    assert f"{rate} in processes 0, 2, 3; 0.5 in process 1" in said["optimizer.learning_rate"]


def test_agreement_leaves_out_what_changes_no_result(together):
    """These keys alone, which may differ."""
    private = {"output_dir": "/elsewhere", "data.cache_dir": "/elsewhere", "data.num_workers": 3}
    private |= {"compile.cache_dir": "/elsewhere"}
    assert {*agreement.PRIVATE_KEYS} == {*private}
    assert together((Config(), {}), (replace(Config(), **private), {})) == [{}, {}]


def test_agreement_compares_the_content_of_a_path_if_it_is_known(together):
    other = replace(Config(), **{"data.path": "/elsewhere"})
    content = {"data.path": "digest"}
    assert together((Config(), content), (other, content)) == [{}, {}]
    problems = together((Config(), content), (Config(), {"data.path": "another"}))
    assert set(problems[0]) == {"data.path"}


def test_source_digest_depends_on_every_source_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("x = 1")
    first = source_digest(tmp_path)
    source_digest.cache_clear()
    (tmp_path / "a" / "b.py").write_text("x = 2")
    assert source_digest(tmp_path) != first
    assert source_digest() == source_digest(Path(maxpipe.__file__).parent)
