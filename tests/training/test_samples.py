"""Samples of text at evaluations: those of `load_model(...).generate`, on every engine."""

import re

import jax
import pytest
from helpers.commands import exit_code
from helpers.runs import assert_same_run
from helpers.training_process import command

import maxpipe
from maxpipe import train
from maxpipe.config import Config, ConfigError, replace
from maxpipe.training.samples import check_samples

PROMPTS = ["import os\n", "\x1b[31mdef "]
STAGES = ("mesh.ici.stage=2", "mesh.ici.fsdp=4")
ENGINES = {
    "sequential": ("mesh.ici.stage=1", "mesh.ici.fsdp=8"),
    "circular": (*STAGES, "pipeline.schedule=circular"),
    "scheduled": (*STAGES, "pipeline.schedule=lockstep_1f1b"),
    "mpmd": (*STAGES, "pipeline.schedule=interleaved_1f1b"),
}


def words_of(tmp_path, *words):
    text = tmp_path / "text.txt"
    text.write_text("import os\nimport sys\n\ndef f(x):\n    return x\n" * 40)
    data = ("data.source=text", f"data.path={text}", "data.eval_fraction=0.5", "steps=2")
    evaluation = ("mesh.simulated_devices=0", "eval.every=2", "eval.batches=1")
    return command(tmp_path, *data, *evaluation, *words)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("circular", "scheduled")]


@pytest.mark.parametrize("engine", ["sequential", "mpmd", *SLOW])
def test_samples_are_what_the_saved_model_generates_and_training_stays(tmp_path, capsys, engine):
    prompts = 'eval.prompts=["import os\\n","\\e[31mdef "]'
    assert train.main([*words_of(tmp_path, *ENGINES[engine]), prompts, "run_name=a"]) == 0
    out = capsys.readouterr().out
    model = maxpipe.load_model(tmp_path / "a")
    assert model.config.pipeline.engine == engine
    assert "\x1b" not in out
    events = b"".join(path.read_bytes() for path in (tmp_path / "a" / "tensorboard").iterdir())
    for number, prompt in enumerate(PROMPTS, 1):
        text = model.generate(prompt, temperature=0, max_tokens=40)
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in f'"{prompt}" -> "{text}"')
        assert f"step 2/2  {shown}\n" in out
        assert f"eval/sample_{number}".encode() in events
        assert f"    {prompt}{text}".replace("\n", "\n    ").encode() in events
    if engine == "sequential":
        assert train.main([*words_of(tmp_path, *ENGINES[engine]), "run_name=b"]) == 0
        assert_same_run(tmp_path / "a", tmp_path / "b", 2)


def test_prompts_that_cannot_be_continued_are_refused(tmp_path, capsys):
    for prompt, reason in {'""': "is empty", "a" * 17: "has 18 tokens.*shorten it"}.items():
        words = words_of(tmp_path, *ENGINES["sequential"], f"eval.prompts=[{prompt}]")
        assert exit_code(train.main, words) == 2
        assert re.search(f"eval.prompts.*{reason}", capsys.readouterr().err)


def test_prompts_are_for_runs_of_one_process(monkeypatch):
    config = replace(Config(), **{"eval.prompts": ["a"]})
    check_samples(config)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"eval\.prompts: .*maxpipe\.generate"):
        check_samples(config)
