import pytest

from maxpipe.checkpoint.policies import step_to_resume
from maxpipe.config import ConfigError


@pytest.mark.parametrize(
    ("resume", "steps", "chosen"),
    [
        ("auto", [], None),
        ("auto", [10, 30, 20], 30),
        ("must", [10, 20], 20),
        ("never", [], None),
        ("10", [10, 20], 10),
        ("0", [0, 10], 0),
    ],
)
def test_step_to_resume_returns_chosen_step(resume, steps, chosen):
    assert step_to_resume(resume, steps) == chosen


@pytest.mark.parametrize(
    ("resume", "steps", "message"),
    [
        ("must", [], r"nothing to resume \(committed steps in runs/a: none\)"),
        (
            "never",
            [10, 20],
            r"committed steps in runs/a: 10, 20; delete them or choose another run_name",
        ),
        ("15", [20, 10], r"step 15 does not exist \(committed steps in runs/a: 10, 20\)"),
        ("15", [], r"step 15 does not exist \(committed steps in runs/a: none\)"),
        ("yes", [10], "'yes' is not auto, never, must or the number of a step"),
        ("-1", [10], "'-1' is not auto"),
        ("²", [2], "'²' is not auto"),
    ],
)
def test_step_to_resume_refusal_names_key_and_steps(resume, steps, message):
    with pytest.raises(ConfigError, match=message) as caught:
        step_to_resume(resume, steps, "runs/a")
    assert [problem.key for problem in caught.value.problems] == ["checkpoint.resume"]
