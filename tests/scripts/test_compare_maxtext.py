"""Test the comparison with MaxText on processes that print the trainers' lines."""

import sys

import pytest
from helpers.scripts import load_script

script = load_script("benchmark/compare_maxtext")


def printing(line, times=3, code=0):
    """Return a command that prints `line` for each step and exits with `code`."""
    return [
        sys.executable,
        "-u",
        "-c",
        f"import sys\nfor i in range({times}): print({line!r} % i)\nsys.exit({code})",
    ]


def test_train_measures_steps_by_the_lines_of_each_trainer_and_shows_why_it_failed(capsys):
    for trainer, line in (
        ("maxtext", "I1121 completed step: %d, seconds: 0.1"),
        ("maxpipe", "step %d/3  loss 5.6"),
    ):
        run = script.train(trainer, printing(line), steps=3)
        assert len(run.cpu) == len(run.wall) == 2
        assert run.first_step > 0
        assert run.peak > 2**20
    for times, code in ((2, 0), (3, 1)):
        with pytest.raises(script.Failed, match=rf"ended with {code}:\nstep 0/3"):
            script.train("maxpipe", printing("step %d/3", times, code), steps=3)
    # A Python without MaxText.
    assert script.main([sys.executable]) == 1
    assert (
        f"uv pip install --python {sys.executable} 'maxtext[tpu]==0.2.5'" in capsys.readouterr().err
    )
    assert script.main(["/nowhere/python"]) == 1
    assert "cannot run /nowhere/python: No such file" in capsys.readouterr().err


def test_tables_divide_maxtext_by_maxpipe():
    maxtext = script.Run(30.0, [4.0, 6.0, 5.0], [2.0], 300 * 2**20)
    maxpipe = script.Run(10.0, [4.0], [4.0], 200 * 2**20)
    table = script.training_table({"fsdp": {"maxtext": [maxtext], "maxpipe": [maxpipe]}})
    row = table.splitlines()[-1]
    assert row == "| fsdp | 30 | 10 | 3.00 | 5 | 4 | 1.25 | 2 | 4 | 0.50 | 300 | 200 | 1.50 |"
    sizes = {
        "maxtext circular": {"argument": 2**20, "temp": 8 * 2**20},
        "maxpipe": {"argument": 2**20, "temp": 2**22},
    }
    assert script.memory_table(sizes).splitlines()[-1] == "| maxpipe | 1 | 4 | 2.00 |"
