"""MaxText's keys are those of its base.yml."""

from pathlib import Path

from maxpipe.config.maxtext import KEYS, LIMITS, misspelt

NAMES = (Path(__file__).parent / "maxtext_keys.txt").read_text().split()  # of its base.yml
OLDER = {  # names of earlier versions
    "model_fsdp_ag_once",
    "num_decoder_layers",
    "emb_dim",
    "cosine_learning_rate_final_fraction",
}


def test_tables_name_keys_of_maxtext_once():
    limited = [key for limit in LIMITS for key in limit.keys]
    assert len({*limited, *KEYS}) == len(limited) + len(KEYS)
    assert {*limited} - {*NAMES} == {"lora_rank"}  # of another file
    assert {*KEYS} - {*NAMES, *OLDER} == {"base_config"}
    pipeline = [name for name in NAMES if "pipeline" in name and not name.startswith("scan")]
    assert [name for name in pipeline if not KEYS[name].ours] == []


def test_no_key_of_maxtext_counts_as_misspelt():
    named = {*KEYS, *(key for limit in LIMITS for key in limit.keys)}
    assert {n: misspelt(n) for n in NAMES if n not in named and misspelt(n)} == {
        "mtc_data_parallelism": "ici_data_parallelism"
    }
    assert misspelt("eval_intervl") == "eval_interval"
