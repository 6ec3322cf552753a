"""The account of time, and that no batch is lost or repeated when a run is killed and resumed."""

import signal

import pytest
from helpers.runs import losses, rows
from helpers.training_process import TrainingProcess, command, run, steps_of

from maxpipe.telemetry.profiling import PHASES, TimeAccount, goodput_line, goodput_row


def test_time_account_every_second_has_one_phase():
    now = 0.0
    account = TimeAccount(lambda: now)
    now = 5
    account.enter("step")
    now = 7
    with account.phase("data"):
        now = 10
    now = 11
    with account.phase("checkpoint"):
        now = 15
    now = 16
    assert account.seconds() == dict.fromkeys(PHASES, 0) | {
        "init": 5,
        "step": 4,
        "data": 3,
        "checkpoint": 4,
    }


def test_time_account_nested_compilations_count_once():
    now = 0.0
    account = TimeAccount(lambda: now)
    account.enter("step")
    for ended, seconds in ((3, 1), (5, 1), (6, 5), (9, 2)):  # the third contains the first two
        now = ended
        account.compiled(seconds)
    now = 10
    seconds = account.seconds()
    assert seconds["compile"] == 7
    assert seconds["step"] == 3


def test_time_account_listens_to_jax_compilations():
    import jax
    import jax.numpy as jnp

    with TimeAccount() as account:
        account.enter("step")
        jax.jit(lambda x: jnp.sin(x) * 3.7)(jnp.ones(7)).block_until_ready()
    assert 0 < account.seconds()["compile"] < sum(account.seconds().values())
    before = account.seconds()["compile"]
    jax.jit(lambda x: jnp.sin(x) * 4.7)(jnp.ones(7)).block_until_ready()
    assert account.seconds()["compile"] == before


def test_goodput_is_share_of_steps_in_total_time():
    row = goodput_row(dict.fromkeys(PHASES, 0.0) | {"init": 200.0, "step": 700.0}, lost=100.0)
    assert row["goodput"] == 0.7
    assert row["seconds_lost"] == 100
    line = goodput_line(row)
    assert line.startswith(
        "goodput 70.0 %: init 3:20, compile 0.0 s (initialisation, steps, evaluation), "
    )
    assert line.endswith("step 11:40, checkpoint 0.0 s, evaluation 0.0 s, steps repeated 1:40")

    short = goodput_row(dict.fromkeys(PHASES, 0.0) | {"init": 20.0, "step": 1.0}, lost=0.0)
    assert goodput_line(short).startswith("time spent: init 20.0 s, compile"), "not as a share"


@pytest.mark.slow
def test_train_killed_and_resumed_sees_every_batch_once(tmp_path):
    words = ("telemetry.batch_digest=true", "checkpoint.every=3", "data.source=python_stdlib")
    endless = command(tmp_path / "killed", *words, "steps=100000")
    with TrainingProcess(tmp_path / "log", endless) as process:
        process.wait_for("step      8/")
        process.send(signal.SIGKILL)
        process.wait()
    reached = max(losses(tmp_path / "killed" / "base"))
    whole = command(tmp_path / "whole", *words, "steps=100000")
    for which in (endless, whole):
        code, output = run(tmp_path / "log", [*which, f"stop_after={reached + 2}"])
        assert code == 0, output

    killed, whole = (steps_of(tmp_path / name, "batch_digest") for name in ("killed", "whole"))
    assert list(killed) == list(range(1, reached + 3))
    assert killed == whole
    assert len(set(killed.values())) == len(killed)
    assert losses(tmp_path / "killed" / "base") == losses(tmp_path / "whole" / "base")
    account = [row for row in rows(tmp_path / "killed" / "base") if "goodput" in row][-1]
    assert account["seconds_lost"] > 0
    assert 0 < account["goodput"] < 1
