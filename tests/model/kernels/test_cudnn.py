"""The program for NVIDIA GPUs calls cuDNN, with its windows; nothing runs here."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from jax._src.cudnn import fused_attention_stablehlo

from maxpipe.model.kernels.choose import per_device
from maxpipe.model.kernels.cudnn import Cudnn
from maxpipe.sharding.attention_contract import AttentionOptions
from maxpipe.sharding.rules import AxisRules


@pytest.fixture
def lowered(monkeypatch):
    """lowered(window) -> text for GPUs of the gradient of attention, on two devices."""
    # JAX asks the installed library for its version; there is none here.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def _lowered(window):
        config = tiny(**{"mesh.ici.data": 2, "mesh.ici.stage": 1, "model.attention_window": 4})
        rules = AxisRules(config.sharding.logical_axis_rules, make_mesh(config))
        attend = per_device(Cudnn.build(config.model, 16), rules)

        def loss(q, k, v, window):
            options = AttentionOptions(window=window)
            return attend(q, k, v, jnp.ones((2, 16), jnp.int32), options).astype(np.float32).sum()

        gradient = jax.grad(loss, argnums=(0, 1, 2))
        q, k = (jax.ShapeDtypeStruct((2, 16, heads, 64), jnp.bfloat16) for heads in (4, 2))
        call = (lambda *qkv: gradient(*qkv, window)) if isinstance(window, int | None) else gradient
        arguments = (q, k, k) if isinstance(window, int | None) else (q, k, k, window)
        traced = jax.jit(call).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    return _lowered


def calls(text):
    names = re.findall(r"__cudnn\$(\w+)", text)
    windows = re.findall(r"sliding_window_length\\22: (\d+)", text)
    return sorted(zip(names, map(int, windows), strict=True))


@pytest.mark.parametrize("window", [None, 4])
def test_program_calls_cudnn_forwards_and_backwards(lowered, window):
    size = window or 0
    assert calls(lowered(window)) == [("fmhaSoftmax", size), ("fmhaSoftmaxBackward", size)]


def test_window_that_differs_by_layer_chooses_between_two_calls(lowered):
    text = lowered(jax.ShapeDtypeStruct((), jnp.int32))
    names = ("fmhaSoftmax", "fmhaSoftmaxBackward")
    assert calls(text) == [(name, size) for name in names for size in (0, 4)]
