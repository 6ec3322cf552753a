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

from maxpipe.devices.chips import CHIPS, short_name
from maxpipe.devices.xla_flags import (
    RECOMMENDED,
    added_to,
    advice,
    assignment,
    names_in,
    sets_to_try,
)

# A JAX device kind of every chip in the table.
KINDS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
    "gpu": "NVIDIA L4",
}
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


@pytest.mark.parametrize("name", RECOMMENDED)
def test_advice_for_unset_flags_ends_with_a_line_for_a_shell(name):
    recommended = RECOMMENDED[name]
    said, line = advice(DEVICES[name], {recommended.variable: "--xla_other=1"})
    assert f" on {short_name(KINDS[name])}, " in said
    assert ("--tune-flags" in said) == (name not in ("gpu", "tpu7x"))  # which has no known clock
    text = added_to("--xla_other=1", recommended.flags)
    assert shlex.split(line) == [f"{recommended.variable}={text}"]


@pytest.mark.parametrize("own", ["", "--xla_own=1"])
def test_advice_with_a_flag_that_jax_has_added_leaves_it_out(own):
    name = "LIBTPU_INIT_ARGS"
    after_import = f"{own} --xla_tpu_use_enhanced_launch_barrier=true"
    advised = advice(DEVICES["v5e"], {name: after_import})
    assert advised == advice(DEVICES["v5e"], {name: own})
    assert "barrier" not in advised[-1]


@pytest.mark.parametrize("name", RECOMMENDED)
def test_advice_is_empty_if_flags_are_set_to_any_value(name):
    recommended, device = RECOMMENDED[name], DEVICES[name]
    text = added_to("", recommended.flags)
    assert advice(device, {recommended.variable: text}) == []
    other = text.replace("true", "false")
    assert advice(device, {recommended.variable: other}) == []


@pytest.mark.parametrize(("kind", "platform"), [("cpu", "cpu"), ("TPU v2", "tpu")])
def test_advice_for_cpus_and_unknown_tpus_is_empty(kind, platform):
    assert advice(SimpleNamespace(device_kind=kind, platform=platform), {}) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [("--xla_a=1  -xla_b=x", "ab"), ("--xla_a 65536", "a"), ("--noxla_a", "a"), ("--xla_a=", "a")],
)
def test_flags_that_are_set_in_any_form_are_not_added(text, names):
    added = added_to(text, {f"xla_{name}": "true" for name in "abc"})
    assert added.startswith(text)
    assert {f"xla_{name}" for name in names} <= names_in(text)
    assert added[len(text) :].split() == [
        f"--xla_{name}=true" for name in "abc" if name not in names
    ]


@pytest.mark.parametrize("text", ["--a=1 --b=2", '--a="x y"', "--a=$HOME"])
def test_lines_for_a_shell_keep_the_text(text):
    assert shlex.split(assignment("ARGS", text)) == [f"ARGS={text}"]
    if "$" not in text and '"' not in text:
        assert assignment("ARGS", text) == f'ARGS="{text}"'


@pytest.mark.parametrize("name", SLICES)
def test_sets_to_try_begin_with_what_is_recommended(name):
    first, *others = sets_to_try(name)
    assert first.flags == RECOMMENDED[name].flags
    assert len({choice.name for choice in others}) == len(others) >= 2
    assert ("collectives on sparse cores" in {o.name for o in others}) == (name != "v5e")


# Gathers of sharded weights in a loop of matrix products, for each slice that is named.
COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxpipe.compiling.topology import devices_of
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
# The chips that each set of flags is for: what is recommended, and what --tune-flags tries.
FLAG_SETS: dict[str, list[str]] = {}
for _name in SLICES:
    for _choice in sets_to_try(_name):
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
