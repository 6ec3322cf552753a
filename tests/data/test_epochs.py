"""A length in epochs: the steps that read each training document as often as it says."""

import json

import pytest
from helpers.runs import rows, write_config

import maxpipe
from maxpipe import train
from maxpipe.config import ConfigError, load, resolve
from maxpipe.config.printing import print_config
from maxpipe.data.check import with_steps
from maxpipe.data.loader import make_loader

ONE_ROW = ("data.global_batch_size=1", "mesh.simulated_devices=1", "mesh.ici.stage=1")
ONE_ROW += ("mesh.ici.fsdp=1",)
EIGHT_DEVICES = ("mesh.simulated_devices=0", "mesh.ici.stage=1", "mesh.ici.fsdp=8")
LENGTHS = (5, 70, 33, 1, 118, 64)


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in LENGTHS))
    config, *others = write_config(tmp_path)
    data = ("data.source=jsonl", f"data.path={file}", "data.eval_fraction=0")
    return [config, *others, *data]


def epochs_read(config, steps):
    loader = make_loader(config, "train", [0])
    for _ in range(steps):
        next(loader)
    ((epoch, _, _),) = loader.state.tolist()
    loader.close()
    return epoch


def test_steps_end_with_the_first_that_completes_the_epochs(words):
    for epochs in [1, 3]:
        for packing in ["true", "false"]:
            words = [*words, *ONE_ROW, f"epochs={epochs}", f"data.packing={packing}"]
            loaded = with_steps(load(words[0], words[1:]))
            config = resolve(loaded, 1)
            assert epochs_read(config, config.steps) >= epochs
            assert epochs_read(config, config.steps - 1) == epochs - 1
            assert config.optimizer.decay_steps == config.steps
            assert loaded.remarks[-1].startswith(
                f"steps={config.steps}: {epochs} epochs of 6 documents"
            )


def test_length_that_is_given_last_counts(words, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(f"base: {words[0]}\nepochs: 2\n")  # below it are 200 steps
    loaded = load(str(file), words[1:])
    assert loaded.config.epochs == 2
    assert "derived from epochs" in print_config(loaded)
    assert load(str(file), [*words[1:], "steps=7"]).config.epochs == 0
    assert load(str(file), [*words[1:], "epochs=0"]).config.steps == 200
    for text in ("steps: 3\nepochs: 2\n", "epochs: 2\nsteps: 3\n"):
        file.write_text(f"base: {words[0]}\n{text}")
        with pytest.raises(ConfigError, match=r"epochs .*mine.yml.*: steps=3 is given, too"):
            load(str(file), words[1:])


def test_epochs_of_what_has_none_or_reads_no_data_are_refused(words):
    for word in ["data.source=synthetic", "data.mixture=[{source: python_stdlib, weight: 1}]"]:
        with pytest.raises(ConfigError, match=rf"epochs .*{word[:8]}.*: give steps"):
            load(words[0], [*words[1:], "data.path=", "epochs=2", word])
    with pytest.raises(ConfigError, match=r"epochs .*give steps"):
        resolve(load(words[0], [*words[1:], "epochs=2"]), 1)


def test_run_ends_after_its_epochs_and_the_same_command_ends_there_again(words, capsys):
    words = [*words, *EIGHT_DEVICES, "epochs=2"]
    assert train.main(words) == 0
    # 291 characters and 6 ends of documents; 2 * 297 targets are 2.3 batches of 8 * 32.
    assert "steps=3: 2 epochs of 6 documents, 297 tokens" in capsys.readouterr().out
    run = maxpipe.Run(maxpipe.load_config(*words))
    assert run.config.steps == max(row["step"] for row in rows(run.directory)) == 3
    assert train.main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
