"""MaxText's files and words are merged as MaxText merges them."""

import re

from maxpipe.migration.read import read_maxtext


def test_model_name_finds_the_file_next_to_base(installed):
    config = read_maxtext([str(installed)], ["model_name=llama3-8b"])
    assert config.values["base_emb_dim"] == 4096
    assert config.chosen["head_dim"].endswith("models/llama3-8b.yml")
    assert config.chosen["model_name"] == "command line"
    assert "learning_rate" not in config.chosen


def test_words_may_not_contradict_the_models_file(installed):
    words = ["model_name=llama3-8b", "head_dim=64", "vocab_size=128256"]
    (problem,) = read_maxtext([str(installed)], words).problems
    assert problem.key == "head_dim"
    assert "override_model_config=true" in problem.message
    config = read_maxtext([str(installed)], [*words, "override_model_config=true"])
    assert (config.values["head_dim"], config.problems) == (64, ())


def test_files_that_cannot_be_read_are_all_named(installed):
    base, circle = str(installed), installed.parent / "circle.yml"
    circle.write_text("base_config: circle.yml\n")
    (alone := installed.parent / "alone.yml").write_text("base_config: no.yml\nmodel_name: nothing")
    (tab := installed.parent / "tab.yml").write_text("steps: 1\n\tdtype: float32\n")
    unlike = "neither .*/models/nothing.yml nor .*/models/nothing.yml"
    for files, words, *messages in (
        (["nowhere.yml"], [], "cannot read nowhere.yml"),
        ([str(alone)], [], "base_config .*no.yml nor .*or leave it out: MaxText's def", unlike),
        ([], ["model_name=llama3-8b"], "needs the path of MaxText's base.yml"),
        ([base, "a.yml", "b.yml"], [], "expected base.yml and one model's file", "read a.yml"),
        ([str(circle)], [], "circle"),
        ([str(tab)], [], "tab.yml:2: not valid YAML: a tab where YAML allows only spaces"),
    ):
        config = read_maxtext(files, words)
        problems = [str(problem) for problem in (*config.problems, *config.unread)]
        assert len(problems) == len(messages)
        assert all(map(re.search, messages, problems)), problems


def test_values_are_those_that_maxtext_reads(installed):
    words = ["steps=1e3", "hf_path=", "remat_policy=none", "adam_b1=0.5", "packing=False"]
    values = read_maxtext([str(installed)], words).values
    assert values["steps"] == 1000
    assert values["hf_path"] is values["remat_policy"] is None
    assert values["max_num_checkpoints_to_keep"] is None
    assert (values["adam_b1"], values["packing"], values["learning_rate"]) == (0.5, False, 3e-5)
