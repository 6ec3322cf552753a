"""Which kernel is chosen for which platform and sizes, and what is said about it."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_engine_inputs
from maxpipe.config import ConfigError
from maxpipe.config.catalog import KERNELS
from maxpipe.model.experts.split import choose_kernel as choose_experts_kernel
from maxpipe.model.kernels.choose import choose_gating, choose_kernel, choose_rotation


@pytest.fixture
def choose():
    """choose(platform, length, context, kernel) -> (name, what was said), for heads of 128."""

    def _choose(platform, length=1024, context=1, kernel="auto", **others):
        sizes = {"model.head_dim": 128, "data.sequence_length": length, "mesh.ici.context": context}
        sizes |= {"data.packing": False, "model.dtype": "bfloat16", **others}
        said = []
        return choose_kernel(
            tiny(**sizes, **{"model.attention": kernel}), platform, said.append
        ), "".join(said)

    return _choose


def test_choose_kernel_auto_takes_the_platforms_kernel(choose):
    for platform, name in (("cpu", "dot_product"), ("gpu", "cudnn"), ("tpu", "splash")):
        assert choose(platform) == (name, f"model.attention={name}: the kernel for {platform}")


def test_choose_kernel_auto_with_unfit_lengths_falls_back_with_the_reason(choose):
    for length, context, reason in (
        (192, 1, "192 is not a multiple of 128"),
        (768, 2, "768 is not a multiple of 512 = 128 x 2 x 2 (mesh.*.context)"),
    ):
        name, said = choose("tpu", length, context)
        assert name == "dot_product"
        assert said.endswith(f"splash cannot be used, data.sequence_length={reason}")
        with pytest.raises(
            ConfigError, match=r"model\.attention: splash cannot be used: data\.seq"
        ):
            choose("tpu", length, context, "splash")


@pytest.mark.parametrize(
    ("choose_arrays", "key", "on_tpus", "elsewhere"),
    [
        (choose_rotation, "model.rotation", "product", "slices"),
        (choose_gating, "model.gating", "separate", "fused"),
    ],
)
def test_choose_takes_other_arrays_on_tpus_in_bfloat16_unless_told(
    choose_arrays, key, on_tpus, elsewhere
):
    for platform, dtype, configured, chosen, is_said in (
        ("tpu", "bfloat16", "auto", on_tpus, True),
        ("tpu", "float32", "auto", elsewhere, False),
        ("cpu", "bfloat16", "auto", elsewhere, False),
        ("tpu", "bfloat16", elsewhere, elsewhere, False),
        ("cpu", "float32", on_tpus, on_tpus, False),
    ):
        lines = []
        config = tiny(**{"model.dtype": dtype, key: configured})
        assert choose_arrays(config, platform, lines.append) == chosen
        assert [line.partition(":")[0] for line in lines] == [f"{key}={on_tpus}"] * is_said


def test_engine_inputs_have_the_rotation_and_the_gating_that_are_configured():
    config = tiny(**{"model.rotation": "product", "model.gating": "separate"})
    model = build_engine_inputs(config, make_mesh(config)).program.config
    assert (model.rotation, model.gating) == ("product", "separate")


def test_choose_kernel_that_cannot_serve_is_refused_with_the_remedy(choose):
    sinks = {"model.attention_sinks": True, "model.attention_window": 8}
    assert choose("tpu", **sinks)[0] == "dot_product"
    with pytest.raises(ConfigError, match=r"it has no sinks .*; use auto or dot_product"):
        choose("tpu", kernel="splash", **sinks)
    with pytest.raises(ConfigError, match="it runs on tpu, not on gpu; use auto or dot_product"):
        choose("gpu", kernel="splash")


def test_choose_kernel_on_gpus_says_why_cudnn_cannot_serve(choose):
    for key, value, reason in (
        ("data.packing", True, "does not separate documents"),
        ("model.dtype", "float32", "computes in bfloat16"),
        ("model.head_dim", 256, "is not a multiple of 8 up to 128"),
        ("model.head_dim", 36, "is not a multiple of 8 up to 128"),
        ("mesh.ici.context", 2, "queries of a whole sequence"),
        ("model.attention_sinks", True, "it has no sinks"),
        ("model.attention_soft_cap", 50.0, "it has no soft cap"),
    ):
        name, said = choose("gpu", **{key: value})
        assert name == "dot_product"
        assert said.startswith("model.attention=dot_product: cudnn cannot be used, ")
        assert reason in said
        with pytest.raises(ConfigError, match=r"cudnn cannot be used: .*; use auto or dot_product"):
            choose("gpu", kernel="cudnn", **{key: value})


def test_choose_kernel_for_a_ring_leaves_one_that_serves_none(choose, monkeypatch):
    ring = {"sharding.context_strategy": "ring"}
    assert choose("tpu", context=2, **ring)[0] == "splash"
    monkeypatch.setitem(KERNELS, "splash", replace(KERNELS["splash"], in_ring=False))
    name, said = choose("tpu", context=2, **ring)
    assert name == "dot_product"
    assert "splash cannot be used, sharding.context_strategy=ring" in said


def test_choose_kernel_on_gpus_of_another_maker_or_before_ampere_leaves_cudnn(choose, monkeypatch):
    for version, capability, name in (
        ("rocm 7", None, "dot_product"),
        ("cuda 13000", None, "cudnn"),
        ("cuda 13000", "7.5", "dot_product"),
        ("cuda 13000", "8.0", "cudnn"),
        ("cuda 13000", "12.0", "cudnn"),
    ):
        facts = {} if capability is None else {"compute_capability": capability}
        client = Mock(platform="gpu", platform_version=version)
        client.local_devices.return_value = [SimpleNamespace(**facts)]
        monkeypatch.setattr(
            "maxpipe.model.kernels.cudnn.backend.get_backend", Mock(return_value=client)
        )
        chosen, said = choose("gpu")
        assert chosen == name
        assert ("capability 8.0 (A100), this GPU has" in said) == (capability == "7.5")


def test_experts_on_auto_take_the_kernel_of_the_platform_unless_it_does_not_fit_and_says_so():
    """Of experts of this width."""

    def choose(platform, kernel="auto", width=2880):
        sizes = {"model.embed_dim": 2880, "model.moe.experts": 4, "model.moe.mlp_dim": width}
        said = []
        model = tiny(**sizes, **{"model.moe.kernel": kernel}).model
        return choose_experts_kernel(model, platform, said.append), "".join(said)

    for platform, name in (("cpu", "blocks"), ("gpu", "blocks"), ("tpu", "megablox")):
        assert choose(platform) == (name, f"model.moe.kernel={name}: the kernel for {platform}")
    reason = "megablox cannot be used, model.moe.mlp_dim=250 is not a multiple of 8"
    assert choose("tpu", width=250) == ("blocks", f"model.moe.kernel=blocks: {reason}")
    assert choose("tpu", "blocks") == ("blocks", "")
    with pytest.raises(ConfigError, match=r"it runs on tpu, not on cpu; use auto or blocks"):
        choose("cpu", "megablox")
