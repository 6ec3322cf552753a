"""Which kernel of experts is chosen for which platform and sizes, and what is said about it."""

import pytest
from helpers.engines import tiny

from maxpipe.config import ConfigError
from maxpipe.model.experts.split import choose_kernel


@pytest.fixture
def choose():
    """choose(platform, kernel, width) -> (name, what was said), for experts of this width."""

    def _choose(platform, kernel="auto", width=2880):
        sizes = {"model.embed_dim": 2880, "model.moe.experts": 4, "model.moe.mlp_dim": width}
        said = []
        model = tiny(**sizes, **{"model.moe.kernel": kernel}).model
        return choose_kernel(model, platform, said.append), "".join(said)

    return _choose


def test_auto_takes_the_kernel_of_the_platform_unless_it_does_not_fit_and_says_so(choose):
    for platform, name in (("cpu", "blocks"), ("gpu", "blocks"), ("tpu", "megablox")):
        assert choose(platform) == (name, f"model.moe.kernel={name}: the kernel for {platform}")
    reason = "megablox cannot be used, model.moe.mlp_dim=250 is not a multiple of 8"
    assert choose("tpu", width=250) == ("blocks", f"model.moe.kernel=blocks: {reason}")
    assert choose("tpu", "blocks") == ("blocks", "")
    with pytest.raises(ConfigError, match=r"it runs on tpu, not on cpu; use auto or blocks"):
        choose("cpu", "megablox")
