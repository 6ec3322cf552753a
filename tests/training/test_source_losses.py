"""The loss of each source of a mixture, next to that of the whole."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training_process import command

import maxpipe
from maxpipe import train
from maxpipe.config import Config, ConfigError, load, replace, resolve
from maxpipe.data.held_out import open_held_out
from maxpipe.data.loader import source_names

ENTRIES = (("easy", 0.9, "a"), ("hard", 0.1, "sphinx of quartz "))


@pytest.fixture
def words(tmp_path):
    """Return the words of a tiny run on two stages that mixes two folders of text."""
    mixture = []
    for name, weight, text in ENTRIES:
        folder = tmp_path / name
        folder.mkdir()
        for number in range(12):
            (folder / f"{number}.txt").write_text(text * (number + 5))
        mixture.append(f"{{source: text, path: {folder}/*.txt, weight: {weight}}}")
    devices = ("mesh.simulated_devices=0", "mesh.ici.stage=2", "mesh.ici.fsdp=4")
    data = ("data.source=text", "data.packing=false", "data.eval_fraction=0.5")
    evaluation = ("eval.every=2", "eval.batches=3", "steps=2")
    return [
        *command(tmp_path, *devices, *data, *evaluation),
        f"data.mixture=[{', '.join(mixture)}]",
    ]


def _expected_loss(run_dir, config, path):
    model = maxpipe.load_model(run_dir)
    alone = replace(config, **{"data.mixture": [], "data.path": path, "eval.batches": 2})
    held_out, _ = open_held_out(alone, range(config.eval.global_batch_size))
    total = weight = 0.0
    for batch in held_out:
        log_probs = jax.nn.log_softmax(model.logits(batch["tokens"]))
        picked = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
        total -= float((picked * batch["weights"]).sum())
        weight += float(batch["weights"].sum())
    return total / weight


def test_loss_of_a_source_is_that_of_its_held_out_documents(words, tmp_path, capsys):
    assert train.main(words) == 0
    out = capsys.readouterr().out
    config = resolve(load(words[0], words[1:]), 8)
    lines = (tmp_path / "base" / "metrics.jsonl").read_text().splitlines()
    (row,) = (row for row in map(json.loads, lines) if "eval_loss" in row)
    for name, _, _ in ENTRIES:
        path = f"{tmp_path}/{name}/*.txt"
        loss = row[f"eval_loss/text:{path}"]
        expected = _expected_loss(tmp_path / "base", config, path)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert f"text:{path} {loss:.4f}" in out
    losses = [row[f"eval_loss/text:{tmp_path}/{name}/*.txt"] for name, _, _ in ENTRIES]
    assert losses[0] != losses[1]
    assert min(losses) <= row["eval_loss"] <= max(losses)


def test_sources_have_names_of_their_own():
    texts, same = [("text", "a"), ("text", "b")], [("jsonl", "c")] * 2
    entries = [{"source": s, "path": path, "weight": 1} for s, path in texts + same]
    entries = [{"source": "python_stdlib", "weight": 1}, *entries]
    names = ["python_stdlib", "text:a", "text:b", "jsonl:c#4", "jsonl:c#5"]
    assert source_names(replace(Config(), **{"data.mixture": entries}).data) == names


def test_batches_are_divided_among_sources_or_left_out(words):
    assert resolve(load(words[0], words[1:]), 8).eval.batches_per_source == 2
    for word in ("eval.batches_per_source=0", "eval.every=0", "data.eval_path=/etc/hostname"):
        config = resolve(load(words[0], [*words[1:], word]), 8)
        assert open_held_out(config, range(8))[1] == {}


def test_batches_of_sources_that_are_not_told_apart_are_refused(words):
    for word, reason in [
        ("data.mixture=[]", "data.mixture has not several"),
        ("data.eval_path=/etc/hostname", "data.eval_path is one set"),
    ]:
        given = [*words[1:], word, "eval.batches_per_source=3"]
        message = rf"^eval\.batches_per_source .*: 3 batches .*{reason}"
        with pytest.raises(ConfigError, match=message):
            resolve(load("base", given), 8)
