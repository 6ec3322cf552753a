"""lm-eval's view of a run: scores are those of its logits, tasks run without a network."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.runs import write_config

import maxpipe
from maxpipe.evaluate import main

WINDOW = 32  # data.sequence_length of the run
BOS = 256


@pytest.fixture(scope="module", autouse=True)
def _needs_eval():
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")


def of_run(*arguments):
    from maxpipe.generate.lm_eval_model import ModelOfRun

    return ModelOfRun(*arguments)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    words = write_config(tmp_path_factory.mktemp("run"), steps=2, checkpoint="{every: 2}")
    words += ["mesh.simulated_devices=8", "mesh.ici.stage=1", "mesh.ici.fsdp=8"]
    run = maxpipe.Run(maxpipe.load_config(*words, "model.num_layers=2"))
    run.train()
    return Path(run.directory)


@pytest.fixture(scope="module")
def model(run_dir):
    return maxpipe.load_model(run_dir)


def _request(*arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type="", doc={}, arguments=arguments, idx=0)


def _direct(model, context, scored):
    ids = [*context, *scored]
    logits = np.asarray(model.logits([ids[:-1]]), np.float64)[0, len(context) - 1 :]
    likelihood = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    score = sum(row[token] for row, token in zip(likelihood, scored, strict=True))
    return score, logits.argmax(-1).tolist() == scored


def _bytes(text):
    return list(text.encode())


def test_loglikelihood_is_that_of_the_logits(model):
    expected = [
        _direct(model, [BOS, *_bytes("def f(")], _bytes("x):")),
        _direct(model, [BOS], _bytes("import os")),
        _direct(model, [BOS, *_bytes("a")], _bytes(" é")),
        _direct(model, [BOS, *_bytes("x")], _bytes("y" * 20)),
    ]
    for batch_size in [1, 3]:
        pairs = [("def f(", "x):"), ("", "import os"), ("a ", "é"), ("x", "y" * 20)]
        answers = of_run(model, batch_size).loglikelihood([_request(*pair) for pair in pairs])
        np.testing.assert_allclose(
            [score for score, _ in answers], [score for score, _ in expected], rtol=1e-5
        )
        assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
    ids = [BOS, *_bytes("def ")]
    best = int(model.logits([ids])[0, -1].argmax())
    (answer,) = of_run(model)._loglikelihood_tokens([(("", ""), ids, [best])])
    assert answer == (pytest.approx(_direct(model, ids, [best])[0], rel=1e-5), True)


def test_rolling_loglikelihood_scores_each_token_once(model):
    text = "".join(chr(97 + i * i % 26) for i in range(50))
    scores = of_run(model).loglikelihood_rolling([_request(text), _request("ab")])
    ids = _bytes(text)
    first, _ = _direct(model, [BOS], ids[:WINDOW])
    # The rest is scored with as much context as there is room for.
    rest, _ = _direct(model, ids[50 - WINDOW - 1 : WINDOW], ids[WINDOW:])
    assert scores == pytest.approx([first + rest, _direct(model, [BOS], _bytes("ab"))[0]], rel=1e-5)


def test_generate_until_writes_what_the_model_does_up_to_the_end(model):
    written = model.generate("def f(", max_tokens=40, temperature=0)  # longer than it sees
    lm = of_run(model)
    whole = {"until": None, "max_new_tokens": 40, "num_beams": 1, "temperature": 0.0}
    end = written[2:4]
    cut = written[: written.index(end)]
    requests = [_request("def f(", options) for options in (whole, {**whole, "until": [end]})]
    assert lm.generate_until(requests) == [written, cut]
    common = {"until": [], "max_gen_toks": 6, "do_sample": True}
    requests = [_request("def f(", {**common, "top_k": top_k}) for top_k in (-1, 0)]
    every, none = (of_run(model).generate_until([request]) for request in requests)
    assert every == none
    texts = of_run(model).generate_until(requests[:1] * 3)
    assert len({*texts}) == 3  # each is drawn with a seed of its own
    assert of_run(model).generate_until(requests[:1] * 3) == texts
    for options, message in [
        ({"num_beams": 2}, "num_beams: known are"),
        ({"top_p": 0}, "top_p: expected a number above 0"),
    ]:
        with pytest.raises(ValueError, match=f"^generation_kwargs: {message}"):
            lm.generate_until([_request("a", {**common, **options})])


def test_generate_until_long_context_keeps_half_of_what_the_model_sees_at_least(model, monkeypatch):
    prompts = []

    def stream(prompt, options):
        prompts.append((prompt, options.max_tokens))
        return ["answer"]

    monkeypatch.setattr(model, "stream", stream)
    context = "abcdefghij" * 7
    cases = [(8, 24), (16, 16), (256, 16)]
    of_run(model).generate_until([_request(context, {"max_gen_toks": n}) for n, _ in cases])
    assert prompts == [(_bytes(context)[-kept:], n) for n, kept in cases]


def _write_tasks(directory):
    rows = [{"question": f"q{i}", "choices": ["x", "yy"], "answer": i % 2} for i in range(6)]
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        'doc_to_text: "{{question}}"\n'
    )
    (directory / "choose.yaml").write_text(
        f"task: choose_locally\noutput_type: multiple_choice\n{common}"
        'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n'
    )
    (directory / "read.yaml").write_text(
        f"task: read_locally\noutput_type: loglikelihood_rolling\n{common}"
        'doc_to_target: "{{question}}"\nmetric_list: [{metric: bits_per_byte}]\n'
    )


def test_command_prints_the_table_of_local_tasks(run_dir, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    _write_tasks(tmp_path)
    words = [str(run_dir), "--tasks", "choose_locally,re*_locally", "--include", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr()
    assert "choose_locally" in printed.out
    assert "texts scored" in printed.err
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["step"] == 2
    right = 0
    nats = 0.0
    for i in range(6):
        asked = [BOS, *_bytes(f"q{i}")]
        choices = [_direct(model, asked, _bytes(f" {word}"))[0] for word in ("x", "yy")]
        right += int(np.argmax(choices)) == i % 2
        nats -= _direct(model, [BOS], _bytes(f"q{i}"))[0]
    assert results["results"]["choose_locally"]["acc,none"] == pytest.approx(right / 6)
    bits = results["results"]["read_locally"]["bits_per_byte,none"]
    assert bits == pytest.approx(nats / np.log(2) / 12, rel=1e-5)


def test_command_task_that_is_not_known_is_refused(run_dir, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(run_dir), "--tasks", "hellaswagg"])
    assert "lm-eval has no task 'hellaswagg'" in capsys.readouterr().err
