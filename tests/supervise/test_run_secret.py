"""Where supervisors find the secret of their run."""

import os
import threading

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.supervise.run_secret import SECRET, run_secret


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SECRET, raising=False)
    (tmp_path / "c.yml").write_text("base: base\noutput_dir: shared\nmodel.embed_dim: wrong\n")
    return tmp_path


def train(*words):
    return ["python", "-m", "maxpipe.train", "--import", "own", *words]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (train("c.yml"), "shared"),
        (train("c.yml", "output_dir=a", "optimizer.name=own", "output_dir=~/b"), "home/b"),
        (train("c.yml", "run_name=x", "output_dir=x/${run_name}"), "x/x"),
        (train("base", "steps=3"), "runs"),
        (["maxpipe", "train", "base"], "runs"),
        (train("base", "output_dir=gs://bucket/runs"), "home/.cache/maxpipe"),
        (["sh", "train.sh"], "home/.cache/maxpipe"),
        (train(), "home/.cache/maxpipe"),
    ],
)
def test_run_secret_is_in_the_output_dir_for_its_owner_alone(here, command, place):
    secret = run_secret(command, 2)
    (file,) = (here / place).iterdir()
    assert not (here / "gs:").exists()
    assert file.name == f".supervisors-{os.geteuid()}"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == secret
    assert len(secret) == 64


def test_run_secret_is_the_same_for_supervisors_that_begin_together(here):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(run_secret(train("c.yml"), 8)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({*found}) == 1


def test_run_secret_of_the_environment_is_taken_before_any_file_and_from_the_trainer(
    here, monkeypatch
):
    monkeypatch.setenv(SECRET, "word")
    assert run_secret(train("c.yml"), 2) == "word"
    assert SECRET not in os.environ
    assert run_secret(train("c.yml"), 1) != run_secret(train("c.yml"), 1)
    assert not (here / "shared").exists()


@pytest.mark.parametrize("spoil", ["open", "empty", "in the way"])
def test_run_secret_that_others_may_know_is_refused_with_the_remedy(here, spoil):
    run_secret(train("c.yml"), 2)
    (file,) = (here / "shared").iterdir()
    if spoil == "open":
        file.chmod(0o644)
    elif spoil == "empty":
        file.write_text("")
    else:
        file.unlink()
        (here / "shared").rmdir()
        (here / "shared").touch()
    with pytest.raises(ConfigError, match=r"no secret .*; set MAXPIPE_SECRET to the same random"):
        run_secret(train("c.yml"), 2)
