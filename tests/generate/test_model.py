"""`load_model`: logits are those of the training model, text is that of the command."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.hf_folder import write_byte_pairs
from helpers.runs import write_config

import maxpipe
from maxpipe.builder import build_trainer
from maxpipe.data.loader import make_loader
from maxpipe.devices.mesh import build_mesh
from maxpipe.generate import __main__ as generate
from maxpipe.generate import model as model_module
from maxpipe.training.batches import BatchPlacer

PROMPT = "def f("


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    words = write_config(tmp_path_factory.mktemp("model"), steps=2, checkpoint="{every: 1}")
    words += ["mesh.simulated_devices=8", "mesh.ici.stage=1", "mesh.ici.fsdp=8"]
    words += ["optimizer.learning_rate=0.05"]
    run = maxpipe.Run(maxpipe.load_config(*words))
    run.train()
    return run


@pytest.fixture(scope="module")
def model(run):
    return maxpipe.load_model(run.directory)


def test_logits_give_the_losses_of_the_training_model(run, model):
    mesh = build_mesh(run.config)
    trainer = build_trainer(run.config, mesh)
    place = BatchPlacer(mesh, trainer.batch_spec, 8)
    batch = next(make_loader(run.config, "train", place.rows))
    # The model reads each row as one text.
    whole = (batch["segment_ids"] == 1).all(axis=1, keepdims=True)
    assert whole.any()
    batch["weights"] = batch["weights"] * whole
    sums = trainer.forward(run.state, place(batch))
    logits = model.logits(batch["tokens"])
    assert logits.shape == (*batch["tokens"].shape, run.config.model.vocab_size)
    assert logits.dtype == jnp.float32
    log_sums = jnp.log(jnp.exp(logits).sum(-1))
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    losses = (log_sums - chosen) * batch["weights"]
    assert float(losses.sum()) == pytest.approx(float(sums["cross_entropy"]), rel=1e-5)


def test_generate_writes_what_the_command_writes(run, model, capsys):
    flags = "--temperature=1.2 --top-k=40 --top-p=0.9 --seed=3 --stop=e"
    for words, options in [
        (flags, {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 3, "stop": "e"}),
        ("--temperature=0 --stop-token=101", {"temperature": 0.0, "stop_tokens": [101]}),
    ]:
        words = [str(run.directory), "--prompt", PROMPT, "--max-tokens=20", *words.split()]
        assert generate.main(words) == 0
        text = model.generate(PROMPT, max_tokens=20, **options)
        assert capsys.readouterr().out == f"{PROMPT}{text}\n"
        assert text or "stop_tokens" in options


def test_generate_ends_right_after_a_stop_that_is_a_part_of_a_token(run, tmp_path, monkeypatch):
    path = write_byte_pairs(tmp_path, "ab\n\n" * 9, ["<s>"], size=300)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    with_pairs = maxpipe.load_model(run.directory, tokenizer=str(path))
    ids = with_pairs.tokenizer.encode("\n\n").tolist()
    assert len(ids) == 1
    written = [*with_pairs.tokenizer.encode("ab").tolist(), *ids, *ids]
    monkeypatch.setattr(model_module, "generate", lambda *_, **__: iter(written))
    for stop in ("\n", ["\n\n\n", "b\n"], "ab\n"):
        assert with_pairs.generate("a", stop=stop) == "ab\n"


def test_logits_refuse_what_are_no_tokens(model):
    for tokens, message in [
        ([1, 2, 3], r"expected integers \[B, T\]"),
        ([[1.0, 2.0]], r"expected integers \[B, T\]"),
        ([[320]], "the model's ids are 0 to 319; got from 320 to 320"),
        ([[0] * 33], r"expected at most 32 in a row \(data.sequence_length\); got 33"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.logits(tokens)


def test_generate_refuses_bad_arguments(model):
    for options, message in [
        *(({name: -1}, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed")),
        ({"temperature": math.nan}, "^temperature: .*, and finite"),
        ({"stop": ["a", ""]}, "^stop: expected texts, none of them empty"),
        ({"stop_tokens": [7, -1]}, "^stop_tokens: the model has no token -1; its ids are 0 to 319"),
        ({"prompt": ""}, "^prompt: is empty"),
        ({"prompt": "x" * 40}, "^prompt: has 41 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(**{"prompt": PROMPT} | options)


def test_load_model_names_its_arguments(run, model, tmp_path):
    first = maxpipe.load_model(str(run.directory), step=1)
    assert (first.step, model.step) == (1, 2)
    assert repr(model) == f"<maxpipe model of {run.directory}/checkpoints, step 2>"
    kernels = (np.asarray(each.params["head"]["kernel"]) for each in (first, model))
    assert not np.allclose(*kernels)
    for arguments, message in [
        ({"run_dir": tmp_path / "none"}, "run_dir: there is no directory"),
        ({"run_dir": tmp_path}, "run_dir: .*holds no checkpoint"),
        ({"step": 7}, r"step: 7 is not saved .*\[1, 2\]"),
        ({"tokenizer": "ids:321"}, "tokenizer: .*needs 321 ids"),
        ({"tokenizer": str(tmp_path)}, "tokenizer: .*(there is no|neither)"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            _ = maxpipe.load_model(**{"run_dir": run.directory} | arguments).tokenizer
