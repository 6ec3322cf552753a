"""Keys without effect: each is declared once, and refused or noted as the declaration says."""

import re

from maxpipe.config import catalog
from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES
from maxpipe.config.identity import GROUPS
from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.config.printing import describe
from maxpipe.config.rules.layout import engines_of

LOCKSTEP = "pipeline.schedule=lockstep_1f1b"
MPMD = "pipeline.schedule=zb_h1"
SCALING = "model.rope_scaling"
NOTED = {  # words: the note, which is absent once the last of the words is left out
    "eval.batches=8 eval.prompts=[a] eval.every=0": "eval.batches, eval.prompts have no effect "
    "without eval.every",
    "checkpoint.keep=5 checkpoint.every=0": "checkpoint.keep has no effect without "
    "checkpoint.every or checkpoint.every_minutes",
    "optimizer.beta1=0.8 optimizer.beta2=0.9 optimizer.name=sgd": "optimizer.beta2 has no effect "
    "with optimizer.name=sgd, only with adamw, lion, muon",
    f"{SCALING}.factor=2 {SCALING}.low_freq_factor=2 {SCALING}.type=yarn": f"{SCALING}."
    f"low_freq_factor has no effect without {SCALING}.type=llama3",
    f"{LOCKSTEP} pipeline.fsdp_prefetch=true mesh.ici.data=2 mesh.ici.fsdp=1": "pipeline."
    "fsdp_prefetch has no effect without mesh.ici.fsdp>1 or mesh.dcn.fsdp>1",
    "pipeline.unit_times=auto pipeline.engine=mpmd pipeline.schedule=zb_h1": "pipeline.unit_times "
    "has no effect with pipeline.schedule=zb_h1, only with zb_h2, zb_v",
    f"pipeline.remat_cheap=false {MPMD}": "pipeline.remat_cheap has no effect on the mpmd engine",
    "pipeline.num_repeats=4 pipeline.remat_layers=true mesh.ici.fsdp=4 mesh.ici.stage=1": "pipeline"
    ".num_repeats, pipeline.remat_layers have no effect without mesh.ici.stage>1",
    # Noted unless another word is given
    "optimizer.stable_fraction=0.5": "with optimizer.schedule=cosine, only with wsd",
    f"{SCALING}.type=yarn": f"{SCALING}.type has no effect without {SCALING}.factor>1 or ",
    f"{SCALING}.length=long": f"{SCALING}.length has no effect without {SCALING}.type=longrope",
    f"pipeline.memory_limit_gib=16 {MPMD}": "pipeline.memory_limit_gib has no effect without "
    "pipeline.layers_per_stage=auto",
}
ACTS = (
    "checkpoint.keep=5 checkpoint.every=0 checkpoint.every_minutes=5",
    "optimizer.stable_fraction=0.5 optimizer.schedule=wsd",
    f"{SCALING}.type=yarn {SCALING}.factor=2 {SCALING}.beta_fast=16",
    f"pipeline.memory_limit_gib=16 {MPMD} pipeline.layers_per_stage=auto",
    "pipeline.unit_times=auto pipeline.schedule=zb_h2",
    # Derived without effect, but not set
    "eval.every=0",
    "mesh.ici.stage=1 mesh.ici.fsdp=4",
)


def test_keys_without_effect_are_noted_with_what_gives_them_one_and_others_not(noted):
    lines = {words: "\n".join(noted(*words.split())) for words in (*NOTED, *ACTS)}
    assert [words for words in NOTED if NOTED[words] not in lines[words]] == []
    assert [words for words in ACTS if "no effect" in lines[words]] == []


def test_declarations_name_keys_that_exist():
    needs = [n for o in OPTIONS.values() for n in (o.bounds.needs, o.bounds.acts_with)]
    named = {*re.findall(r"[a-z_]+(?:\.[a-z_]+)+", " ".join(needs))}
    named |= {f"pipeline.{name}" for e in ENGINES.values() for name in (*e.unused, *e.reads)}
    named |= {refusal.key for engine in ENGINES.values() for refusal in engine.refusals}
    for section, table in (
        ("pipeline", SCHEDULES),
        ("pipeline", REMAT_POLICIES),
        ("model.moe", catalog.ROUTERS),
        ("optimizer", catalog.OPTIMIZERS),
        ("optimizer", catalog.LR_SCHEDULES),
        ("data", catalog.SOURCES),
        ("model", catalog.BLOCKS),
    ):
        names = [
            name
            for variant in table.values()
            for fact in ("unused", "refused")
            for name in getattr(variant, fact, ())
        ]
        named |= {f"{section}.{name}" for name in names}
    assert named - {*OPTIONS, *SECTIONS} == set()
    assert {policy.on_device for policy in REMAT_POLICIES.values()} - {""} <= {*REMAT_POLICIES}
    assert all(engines_of(name) for name in [*SCHEDULES, "file.csv"])
    assert OPTIONS["checkpoint.accept_changes"].choices == [*GROUPS]


def test_every_pipeline_key_is_read_by_an_engine_that_the_help_names():
    for key in (key for key in OPTIONS if key.startswith("pipeline.") and key != "pipeline.engine"):
        able = [name for name, engine in ENGINES.items() if engine.takes(key)]
        assert able, key
        if key != "pipeline.schedule":
            assert f"engines     {', '.join(able)}\n" in describe(key)


def test_help_says_what_a_key_needs():
    table = {
        "model.mla.v_head_dim": "without model.attention_kind=mla",
        "optimizer.eps": "without optimizer.name=adamw or muon",
        "eval.batches": "without eval.every",
        "pipeline.skip_idle": "mpmd refuses true: it has no ticks",
    }
    assert {key: describe(key) for key, part in table.items() if part not in describe(key)} == {}
