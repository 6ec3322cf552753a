"""Recommended XLA flags: what is printed, and that the installed libtpu takes them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.compile_command import tpu_aot
from helpers.scripts import load_script

from maxpipe.devices.chips import CHIPS, short_name
from maxpipe.devices.xla_flags import RECOMMENDED, added_to, advice, names_in

# A JAX device kind of every chip in the table.
KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}
KINDS |= {"tpu7x": "TPU7x", "gpu": "NVIDIA L4"}
SLICES = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}
DEVICES = {
    name: SimpleNamespace(device_kind=kind, platform="gpu" if name == "gpu" else "tpu")
    for name, kind in KINDS.items()
}


def test_every_tpu_of_the_table_of_chips_has_flags():
    assert {chip.name for chip in CHIPS if chip.torus} | {"gpu"} == set(RECOMMENDED) == set(KINDS)


def test_documentation_has_every_recommended_flag_with_its_chips():
    documented = {}
    text = (Path(__file__).parents[2] / "docs" / "compiling.md").read_text()
    for flag, chips in re.findall(r"^\| `(xla_\w+=\w+)` \| ([^|]+) \| ", text, re.MULTILINE):
        for chip in chips.split(", "):
            documented.setdefault(chip, []).append(flag)
    assert documented == {
        chip: [f"{name}={value}" for name, value in recommended.flags.items()]
        for chip, recommended in RECOMMENDED.items()
    }


def test_advice_is_to_add_unset_flags_and_ends_with_a_line_for_a_shell():
    for name, recommended in RECOMMENDED.items():
        said, line = advice(DEVICES[name], {recommended.variable: "--xla_other=1"})
        assert f" on {short_name(KINDS[name])}, " in said
        assert ("tune_flags" in said) == ("; in a checkout, scripts/" in said)
        text = added_to("--xla_other=1", recommended.flags)
        assert shlex.split(line) == [f"{recommended.variable}={text}"]
        # None where they are set, to any value.
        text = added_to("", recommended.flags)
        for own in (text, text.replace("true", "false")):
            assert advice(DEVICES[name], {recommended.variable: own}) == []
    for kind, platform in (("cpu", "cpu"), ("TPU v2", "tpu")):
        assert advice(SimpleNamespace(device_kind=kind, platform=platform), {}) == []


def test_advice_with_a_flag_that_jax_has_added_leaves_it_out():
    after_import = "--xla_own=1 --xla_tpu_use_enhanced_launch_barrier=true"
    advised = advice(DEVICES["v5e"], {"LIBTPU_INIT_ARGS": after_import})
    assert advised == advice(DEVICES["v5e"], {"LIBTPU_INIT_ARGS": "--xla_own=1"})


def test_flags_that_are_set_in_any_form_are_not_added():
    forms = {"--xla_a=1  -xla_b=x": "ab", "--xla_a 65536": "a", "--noxla_a": "a", "--xla_a=": "a"}
    for text, names in forms.items():
        added = added_to(text, {f"xla_{name}": "true" for name in "abc"})
        assert {f"xla_{name}" for name in names} <= names_in(text)
        others = " ".join(f"--xla_{name}=true" for name in "abc" if name not in names)
        assert added.split() == f"{text} {others}".split()


# Gathers of sharded weights in a loop of matrix products, for each slice that is named.
COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxpipe.compile.topology import devices_of
from maxpipe.config import Config, replace

def run(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

for topology in sys.argv[1:]:
    devices = devices_of(replace(Config(), **{"compile.topology": topology}))
    mesh = Mesh(np.array(devices), ("fsdp",))
    def shape(spec, *sizes):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)
    w, x = shape((None, "fsdp"), 2, 512, 512), shape(("fsdp",), 4096, 512)
    jax.jit(run).lower(w, x).compile()
    print("compiled", topology, devices[0].device_kind, flush=True)
"""
# The chips that each set of flags is for: what is recommended, and what tune_flags.py tries.
FLAG_SETS: dict[str, list[str]] = {}
for _name in SLICES:
    for _choice in load_script("benchmark/tune_flags").sets_to_try(_name):
        FLAG_SETS.setdefault(added_to("", _choice.flags), []).append(_name)


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.parametrize(("flags", "chips"), FLAG_SETS.items())
    def test_the_installed_libtpu_compiles_with_the_flags_of_a_chip(self, flags, chips):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, *(f"{name}:{SLICES[name]}" for name in chips)],
            env={**os.environ, "LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines() == [
            f"compiled {name}:{SLICES[name]} {KINDS[name]}" for name in chips
        ]
