"""Every key of MaxText 0.2.5 has one verdict: a counterpart, one legal value, or no part."""

import fnmatch
from pathlib import Path

from maxpipe.config.maxtext import KEYS, SAME_NAMES, unknown_maxtext_key
from maxpipe.config.maxtext_limits import IDLE, LIMITS, idle_of, limit_of

NAMES = (Path(__file__).parent / "maxtext_keys.txt").read_text().split()  # of its base.yml
OLDER = {  # names of earlier versions
    "model_fsdp_ag_once",
    "num_decoder_layers",
    "emb_dim",
    "cosine_learning_rate_final_fraction",
}
MORE = ("vision_encoder_block", "log_moe_bias_norms")  # in files of models only
PATTERNS = [(pattern, idle) for idle in IDLE for pattern in idle.names.split()]


def test_list_has_the_keys_of_base_yml():
    assert len(NAMES) == len(set(NAMES)) == 786
    assert {"ici_pipeline_parallelism", "engram_seed", "adam_b1"} <= set(NAMES)


def test_every_key_of_maxtext_has_one_verdict():
    verdicts = {
        name: (name in KEYS or name in SAME_NAMES, bool(limit_of(name)), bool(idle_of(name)))
        for name in NAMES
    }
    assert {name: found for name, found in verdicts.items() if sum(found) != 1} == {}


def test_tables_name_keys_of_maxtext_only():
    assert {key for limit in LIMITS for key in limit.values} - {*NAMES} == set()
    assert {*KEYS} - {*NAMES, *OLDER} == {"base_config"}


def test_every_pattern_decides_about_a_key():
    def decides(pattern, idle):
        names = [name for name in fnmatch.filter([*NAMES, *MORE], pattern) if name not in KEYS]
        return idle in [idle_of(name) for name in names]

    assert [pattern for pattern, idle in PATTERNS if not decides(pattern, idle)] == []


def test_keys_that_only_the_code_of_maxtext_has_are_not_called_none():
    names = (Path(__file__).parent / "maxtext_other_keys.txt").read_text().split()  # of types.py
    assert len(names) == 163
    unknown = [n for n in names if n not in KEYS and not idle_of(n) and not limit_of(n)]
    assert [n for n in unknown if "no key of MaxText" in unknown_maxtext_key(n)] == []
    assert idle_of("vision_encoder_block")
    assert idle_of("log_moe_bias_norms")
    assert limit_of("hidden_size") is idle_of("hidden_size") is None
    assert "no key of MaxText" in unknown_maxtext_key("hidden_size")
    assert unknown_maxtext_key("eval_intervl").endswith("did you mean eval_interval?")
