"""Losses and gradients of every engine equal those of one device: models x layouts.

Layouts are words as `helpers.engines.keys` reads them; pipelines have two stages and four
microbatches unless their words say otherwise. The first layouts of a model run by default, those
that differ little from them are marked `slow`. Dropout takes as long to compile as all else, so
that few of the first have it.
"""

import math
from typing import NamedTuple

import pytest
from helpers.engines import (
    LATENT_WORDS,
    SEQUENCE_LENGTH,
    assert_equals_one_device,
    on_one_device,
    reference,
    tiny,
    under_test,
)
from helpers.routing import assert_same_as_one_device
from jax.tree_util import keystr, tree_leaves_with_path

ROWS = 16
STAGES = "stage=2 num_microbatches=4 "
REPEATS = "num_layers=4 num_repeats=2 "


class Model(NamedTuple):
    """Words of a model, and layouts of it for every run and for some."""

    words: str
    default: list[str]
    slow: list[str]


LOSSES = "moe.per_token=2 moe.mlp_dim=16 moe.balance_loss=0.3 moe.z_loss=0.1 moe.bias_rate=0.5 "
# As gpt-oss has them; the limit is within the range of values.
BIASES = (
    "mlp_bias=true mlp_activation=quick_gelu mlp_limit=0.5 mlp_up_offset=1.0 moe.logit_bias=true "
    "moe.router=topk_softmax moe.bias_rate=0.0"
)
# DeepSeek-V3's layers: latent attention, a shared expert, and dense layers before the pipeline.
DEEPSEEK = (
    LATENT_WORDS + " num_layers=4 first_dense_layers=1 moe.shared_experts=1 outside_layers=before "
)
CAPACITY = "moe.capacity_factor=1.0"
# Every third layer has a window, and layers know their place in the model.
PATTERN = "layer_pattern=[global,global,local] attention_window=3 "

MODELS = {
    "dropout": Model(
        "num_layers=2 dropout=0.2",
        default=[
            "engine=sequential num_microbatches=4",
            "engine=sequential num_microbatches=2 fsdp=4 remat_policy=none",
            # A chunk is one token; dropout masks belong to tokens, tiles of logits to devices.
            "engine=sequential num_microbatches=2 context=4 tensor=2 logit_tiles=2",
        ],
        slow=[
            "engine=sequential data=2 fsdp=2 tensor=2",
            "engine=sequential num_microbatches=16 remat_policy=minimal",
            "engine=sequential scan_layers=false remat_policy=minimal fsdp=4",
            "engine=sequential data=4 num_microbatches=4",
            "engine=sequential num_microbatches=2 fsdp=4 scan_layers=false",
            "schedule=zb_h1 data=2 fsdp=2 remat_policy=minimal",
        ],
    ),
    "tied": Model(
        "num_layers=2 tie_embeddings=true",
        default=[
            "engine=sequential num_microbatches=2 tensor=4 context=2",  # more than key heads
            # Microbatches of parts in a program that is manual over fsdp.
            "schedule=circular num_microbatches=2 context=2 fsdp=2 fsdp_gather=once",
            "schedule=circular num_microbatches=2 fsdp=2 scan_iterations=false",
            "schedule=lockstep_1f1b fsdp=2 fsdp_prefetch=true delay_activation_forwarding=true "
            "remat_policy=minimal remat_cheap=false",
        ],
        slow=[
            "schedule=1f1b context=2 fsdp=2 scan_layers_per_stage=false",
            "schedule=lockstep_1f1b num_layers=4 num_repeats=2 context=2 fsdp=2",
            "engine=sequential num_microbatches=2 tensor=4",
            "schedule=circular num_microbatches=2 context=2 data=2 fsdp_gather=once",
            "schedule=circular num_layers=4 num_microbatches=2 fsdp=2 scan_iterations=false "
            "num_repeats=2 fsdp_gather=per_repeat",
            "schedule=lockstep_1f1b num_layers=4 fsdp_prefetch=true fsdp=2 num_repeats=2 "
            "delay_activation_forwarding=true",
            "schedule=lockstep_1f1b fsdp_prefetch=true fsdp=4",
            "schedule=lockstep_1f1b fsdp_prefetch=true fsdp=4 skip_idle=false",
            "schedule=lockstep_zb fsdp_prefetch=true fsdp=4 remat_policy=minimal",
            "schedule=lockstep_1f1b num_layers=4 fsdp_prefetch=true fsdp=2 tensor=2 num_repeats=2",
            "schedule=lockstep_1f1b fsdp_prefetch=true fsdp=2 num_repeats=2 num_layers=8 "
            "num_layers_per_stage=2 scan_layers_per_stage=false",
        ],
    ),
    "eight_layers": Model(
        "num_layers=8 num_layers_per_stage=2 num_repeats=2 dropout=0.1",
        default=[],
        slow=[
            "schedule=circular remat_policy=full remat_cheap=false",
            "schedule=lockstep_1f1b remat_policy=minimal remat_cheap=false",
            "schedule=lockstep_zb remat_policy=minimal remat_cheap=false",
        ],
    ),
    # Layers outside the pipeline.
    "outside": Model(
        "tie_embeddings=true num_layers=4 parallel_layers=2 dropout=0.2 block=balanced",
        default=[
            "schedule=lockstep_1f1b outside_layers=before fsdp=2 data=2 fsdp_gather=once dropout=0",
            "schedule=1f1b outside_layers=after",
        ],
        slow=[
            "schedule=lockstep_1f1b outside_layers=before fsdp=2 data=2 fsdp_gather=once",
            # Of three rows, which two stages share, one of the second stage is padding.
            "schedule=lockstep_1f1b global_batch_size=12",
            "schedule=lockstep_1f1b global_batch_size=12 outside_layers=before "
            "remat_policy=minimal",
            "schedule=lockstep_zb outside_layers=before layers_per_stage=[2,1] parallel_layers=3 "
            "num_layers=8 remat_policy=minimal delay_activation_forwarding=true "
            "fsdp_prefetch=true fsdp=2 tensor=2 scan_layers_per_stage=false",
            # The first and the last chunk lie on the same stage.
            "schedule=zb_v outside_layers=before num_layers=6 parallel_layers=4 "
            "remat_policy=minimal",
            "schedule=zb_v outside_layers=after num_layers=5 parallel_layers=4 remat_policy=none "
            "tie_embeddings=false",
            "schedule=interleaved_1f1b num_repeats=2 fsdp=2 num_layers=6 parallel_layers=4 "
            "remat_layers=true",
            "schedule=interleaved_1f1b num_repeats=2 fsdp=2 num_layers=5 parallel_layers=4 "
            "outside_layers=before fsdp_gather=once scan_layers_per_stage=true",
            "schedule=1f1b outside_layers=before num_layers=6 parallel_layers=4 "
            f"layers_per_stage=[1,3] {PATTERN}",
            "schedule=1f1b outside_layers=before num_layers=6 parallel_layers=4 "
            "first_dense_layers=1 moe.experts=4 moe.mlp_dim=16 moe.balance_loss=0.3 block=llama",
        ],
    ),
    # Fewer microbatches than stages, groups of different sizes.
    "microbatches": Model(
        "",
        default=[
            "schedule=lockstep_1f1b stage=4 num_microbatches=1 global_batch_size=10",
            "schedule=lockstep_1f1b num_microbatches=5 global_batch_size=10 num_repeats=2 "
            "delay_activation_forwarding=true",
        ],
        slow=[],
    ),
    # Several options at once, as the grids of the engines have them.
    "options": Model(
        "z_loss=0.01 logit_soft_cap=5.0 global_batch_size=48",
        default=[
            REPEATS + "schedule=circular fsdp=2 fsdp_gather=per_repeat remat_iterations=false "
            "remat_layers=true",
            "engine=circular schedule=circular stage=1 num_microbatches=1 num_repeats=2 "
            "layers_per_stage=[1,2] parallel_layers=3 outside_layers=before data=2 fsdp=2 tensor=2 "
            "block=balanced logit_tiles=3 remat_policy=minimal_offloaded",
            REPEATS + "schedule=lockstep_zb num_microbatches=3 fsdp=2 tie_embeddings=true "
            "qk_norm=true attention_bias=true block=balanced remat_policy=minimal",
            "schedule=lockstep_1f1b stage=4 num_repeats=2 num_microbatches=16 num_layers=11 "
            "layers_per_stage=[1,2,1,1,2,1,1,2] logit_tiles=3 remat_policy=minimal "
            "remat_layers=true overlap_slots=true fsdp_gather=once",
        ],
        slow=[
            REPEATS + "schedule=circular data=2 fsdp_gather=once tie_embeddings=true qk_norm=true "
            "attention_bias=true delay_activation_forwarding=true scan_layers_per_stage=false "
            "scan_repeats=false remat_policy=none",
            REPEATS + "schedule=circular fsdp=2 fsdp_gather=per_repeat dropout=0.2 "
            "remat_iterations=false remat_layers=true",
            "schedule=lockstep_zb num_layers_per_stage=2 num_microbatches=2 fsdp=2 tensor=2 "
            "fsdp_gather=once delay_activation_forwarding=true skip_idle=false "
            "remat_policy=minimal",
            "schedule=lockstep_zb stage=4 num_microbatches=16 remat_policy=none overlap_slots=true",
            # Its gathers of whole weights, its loops and its head have collectives of the same
            # kind, which CPU devices would mix up if nothing kept them in order.
            "schedule=lockstep_zb stage=4 num_repeats=2 num_microbatches=16 num_layers=12 "
            "layers_per_stage=[1,2,1,1,2,1,1,2] parallel_layers=11 dropout=0.2 logit_tiles=3 "
            "remat_policy=none remat_iterations=false skip_idle=false fsdp_gather=once",
        ],
    ),
    # Of 4 stages and 2-way fsdp, stage divides 20 columns and fsdp 18; tokens do not divide.
    "odd_sizes": Model(
        "head_dim=4 vocab_size=67 global_batch_size=24",
        default=["schedule=lockstep_1f1b embed_dim=20 stage=4 num_microbatches=12 fsdp=2"],
        slow=["schedule=lockstep_1f1b embed_dim=18 stage=4 num_microbatches=12 fsdp=2"],
    ),
    # Both ends of the model and every stage of several devices.
    "mpmd": Model(
        "num_layers=5 z_loss=0.01 tie_embeddings=true dropout=0.2 global_batch_size=48",
        default=[
            "schedule=zb_v num_repeats=2 layers_per_stage=[1,2,1,1] data=2 fsdp=2 dropout=0 "
            "remat_policy=none fsdp_gather=once",
        ],
        slow=[
            "schedule=1f1b layers_per_stage=[2,3] fsdp=2 tensor=2 num_microbatches=3 "
            "remat_policy=none scan_layers_per_stage=true",
            "schedule=zb_v num_repeats=2 layers_per_stage=[1,2,1,1] remat_policy=minimal",
            "schedule=1f1b num_layers=4 fsdp=2 tensor=2 fsdp_gather=once "
            "scan_layers_per_stage=true remat_policy=minimal",
            # Residuals in the host's memory.
            "schedule=1f1b num_layers=4 fsdp=2 tensor=2 scan_layers_per_stage=true "
            "remat_policy=minimal_offloaded",
            "schedule=1f1b num_layers=4 fsdp=2 remat_layers=true remat_iterations=false "
            "remat_policy=minimal_offloaded",
            "schedule=1f1b num_layers=4 remat_policy=custom remat_tensors.mlp_up=offload",
        ],
    ),
    "latent": Model(
        LATENT_WORDS + " num_layers=2",
        default=["schedule=1f1b context=2 tensor=2"],
        slow=[
            "engine=sequential fsdp=2 tensor=2 context=2",
            "schedule=zb_v num_layers=4 num_repeats=2 context=2 tensor=2",
            "schedule=lockstep_1f1b num_layers=4 fsdp=2 tensor=2 parallel_layers=2 "
            "outside_layers=before",
            "schedule=circular num_layers=4 num_repeats=2 context=2 fsdp=2 mla.q_lora_rank=0 "
            "fsdp_gather=per_repeat remat_policy=minimal",
        ],
    ),
    # Keys and values that go around a ring of devices.
    "ring": Model(
        "num_layers=2 context_strategy=ring",
        default=[
            "engine=sequential num_microbatches=2 context=4 tensor=2 remat_policy=minimal",
            "schedule=lockstep_1f1b context=4",
            "schedule=1f1b context=4 scan_layers_per_stage=false",
        ],
        slow=[
            "schedule=circular context=2 fsdp=2 fsdp_gather=once",
            "engine=sequential num_microbatches=2 context=2 tensor=4",  # more than key heads
            "engine=sequential num_microbatches=2 context=4 scan_layers=false remat_policy=none",
            "schedule=circular num_layers=4 num_repeats=2 context=4 fsdp_gather=per_repeat",
            "schedule=lockstep_1f1b num_layers=4 num_repeats=2 context=2 fsdp=2 "
            "tie_embeddings=true fsdp_prefetch=true remat_policy=minimal",
            "schedule=lockstep_zb context=2 tensor=2 remat_policy=minimal",
            "schedule=zb_v num_layers=4 num_repeats=2 context=2 tensor=2 remat_policy=minimal",
            "schedule=1f1b context=2 tensor=2 " + LATENT_WORDS,
        ],
    ),
    "lora": Model(
        "num_layers=2 lora.rank=2 lora.alpha=6.0 lora.dropout=0.3",
        default=[
            "schedule=lockstep_1f1b fsdp=2 lora.dropout=0",
            "engine=sequential num_microbatches=2 fsdp=2 tensor=2",
            "schedule=circular fsdp=2",
        ],
        slow=[
            "schedule=lockstep_1f1b num_layers=4 fsdp=2 tensor=2 parallel_layers=2 "
            "fsdp_gather=once tie_embeddings=true",
            "schedule=lockstep_1f1b num_layers=4 fsdp=2 parallel_layers=2 outside_layers=before",
            "schedule=lockstep_1f1b fsdp=2 fsdp_prefetch=true",
            "schedule=lockstep_zb tensor=2 lora.targets=[query,value] remat_policy=minimal",
            "schedule=lockstep_1f1b fsdp=2",
            "schedule=circular num_layers=4 num_repeats=2 fsdp=2 fsdp_gather=per_repeat",
            "schedule=circular fsdp=2 context=2 fsdp_gather=once",
            "schedule=1f1b tensor=2",
            "schedule=zb_v num_layers=4 fsdp=2 remat_policy=minimal",
            "schedule=lockstep_1f1b expert=2 num_layers=5 first_dense_layers=1 moe.experts=4 "
            "moe.mlp_dim=16 moe.shared_experts=1 moe.bias_rate=0.01",
        ],
    ),
    "first_dense": Model(
        "num_layers=4 first_dense_layers=2 moe.experts=4 moe.mlp_dim=16 moe.balance_loss=0.3 "
        + PATTERN,
        default=["schedule=circular context=2 remat_policy=minimal"],
        slow=[
            "engine=sequential num_microbatches=2 fsdp=2 context=2",
            "schedule=lockstep_1f1b fsdp=2 tie_embeddings=true",
            "schedule=lockstep_1f1b num_layers=6 tensor=2 parallel_layers=2 outside_layers=before "
            "fsdp_gather=once",
            "schedule=1f1b tensor=2 moe.router=sigmoid moe.selection_bias=true",
        ],
    ),
    "experts": Model(
        "num_layers=2 moe.experts=6 " + LOSSES,
        default=[
            "schedule=1f1b context=2 remat_policy=minimal",
        ],
        slow=[
            "engine=sequential fsdp=2 tensor=2 context=2",
            "schedule=zb_v num_layers=4 num_repeats=2 context=2 remat_policy=minimal",
            "schedule=lockstep_1f1b num_layers=4 num_repeats=2 fsdp=2 tensor=2 "
            f"moe.shared_experts=1 {BIASES}",
            "schedule=lockstep_zb context=2 data=2 remat_policy=minimal",
            "schedule=circular num_layers=4 num_repeats=2 context=2 tensor=2 fsdp_gather=once",
            "schedule=circular data=2 fsdp=2 moe.router=sigmoid remat_policy=minimal",
            f"schedule=1f1b fsdp=2 tensor=2 {BIASES}",
        ],
    ),
    # Experts on devices of their own, with the other mesh axes and what could get in the way.
    "expert_axis": Model(
        "num_layers=2 expert=2 num_microbatches=2 moe.experts=6 " + LOSSES,
        default=[
            "schedule=lockstep_1f1b moe.dispatch=all_to_all tensor=2 moe.shared_experts=1 "
            + BIASES,
            "schedule=circular moe.dispatch=ring fsdp=2",
        ],
        slow=[
            "schedule=1f1b moe.dispatch=ring fsdp=2 fsdp_gather=once",
            "engine=sequential num_microbatches=1 moe.dispatch=all_to_all context=2 data=2",
            REPEATS + "schedule=circular moe.dispatch=all_to_all fsdp=2 fsdp_gather=once "
            "moe.shared_experts=1",
            # What autodiff would sum in every iteration, without split weights.
            REPEATS + "schedule=circular moe.dispatch=ring data=2 fsdp_gather=once",
            REPEATS + "schedule=lockstep_1f1b moe.dispatch=ring fsdp=2 fsdp_gather=once "
            "skip_idle=false",
            REPEATS + "schedule=zb_v moe.dispatch=all_to_all context=2 remat_policy=minimal",
            REPEATS + "schedule=lockstep_1f1b moe.dispatch=all_to_all fsdp=2 " + CAPACITY,
            REPEATS + "schedule=circular moe.dispatch=ring tensor=2 " + CAPACITY,
            DEEPSEEK + "schedule=lockstep_1f1b moe.dispatch=ring fsdp=2 parallel_layers=2",
            DEEPSEEK + "schedule=circular moe.dispatch=all_to_all parallel_layers=2",
            DEEPSEEK + "schedule=1f1b num_layers=5 outside_layers=after moe.dispatch=ring",
        ],
    ),
}


def cases():
    for name, model in MODELS.items():
        for layouts, marks in ((model.default, []), (model.slow, [pytest.mark.slow])):
            for layout in layouts:
                words = ("" if "engine=sequential" in layout else STAGES) + model.words
                yield pytest.param(f"{words} {layout}", marks=marks, id=f"{name} {layout}")


@pytest.mark.parametrize("words", cases())
def test_losses_and_gradients_equal_those_of_one_device(words):
    """Whatever idle slots and bubbles hold."""
    config = tiny(words)
    fill = {"scheduled": "idle_fill", "circular": "bubble_fill"}.get(config.pipeline.engine)
    options = {fill: math.nan} if fill else {}
    if config.model.moe.experts:
        train = under_test(config, **options).train
        assert_same_as_one_device(train, on_one_device(config), ROWS)
    else:
        assert_equals_one_device(config, **options)


def test_every_assignment_of_a_token_to_an_expert_is_counted():
    config = tiny(MODELS["experts"].words)
    expected = reference(config.model, ROWS)
    assert set(expected.auxiliary) == {"balance_loss", "z_loss"}
    assignments = ROWS * SEQUENCE_LENGTH * config.model.moe.per_token
    assert expected.load.sum(axis=1).tolist() == [assignments] * config.model.num_layers


def test_adapters_alone_have_gradients():
    expected = reference(tiny(MODELS["lora"].words).model, ROWS)
    names = [keystr(path) for path, _ in tree_leaves_with_path(expected.gradients)]
    assert names
    assert all("_adapter'" in name for name in names)


def test_first_dense_layers_lie_beside_the_embedding():
    first = reference(tiny(MODELS["first_dense"].words).model, ROWS).gradients["embed"]["first"]
    assert set(first) == {"0", "1"}
    assert "moe" not in first["0"]
