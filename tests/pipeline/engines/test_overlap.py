"""What may run at the same time in a step, by the dependences of the traced program."""

import re

import pytest
from helpers.compile_command import report_of, tpu_aot
from helpers.engines import SEQUENCE_LENGTH, TINY, EngineUnderTest, tiny
from helpers.programs import loop_bodies

from maxpipe.compile.hlo import parse
from maxpipe.devices.xla_flags import RECOMMENDED, added_to
from maxpipe.pipeline.jaxprs import ancestors, inner_jaxprs, open_jaxpr, read_by

ROWS = 16


def traced(words):
    return EngineUnderTest(tiny(words)).traced()


SLOTS = ("forward", "head", "backward")


def slot_of(eqn):
    return next((s for s in str(eqn.source_info.name_stack).split("/") if s in SLOTS), None)


def needs(body, eqns, sources):
    before = ancestors(body.eqns, [v for eqn in eqns for v in eqn.invars])
    return any(eqn is source for eqn in before for source in sources)


def any_backward_slot_waits_for_forward(schedule, *, overlap):
    step = traced(
        f"schedule={schedule} overlap_slots={overlap} num_microbatches=4 num_repeats=2 stage=2 "
        "remat_policy=minimal scan_layers_per_stage=false"
    )
    waits = []
    for body in loop_bodies(step):
        slots = {slot: [eqn for eqn in body.eqns if slot_of(eqn) == slot] for slot in SLOTS}
        if slots["forward"] and slots["backward"]:
            waits.append(needs(body, slots["backward"], slots["forward"] + slots["head"]))
    assert waits
    return any(waits)


@pytest.mark.parametrize("schedule", ["lockstep_1f1b", "lockstep_zb"])
@pytest.mark.parametrize("overlap", [False, True])
def test_backward_slot_waits_for_its_ticks_forward_unless_slots_overlap(
    schedule, overlap, as_on_tpus
):
    assert any_backward_slot_waits_for_forward(schedule, overlap=overlap) is not overlap


def test_backward_slot_on_cpu_devices_waits_for_its_ticks_forward():
    assert any_backward_slot_waits_for_forward("lockstep_1f1b", overlap=True)


def gathers(body):
    def has_gather(eqn):
        inner = any(has_gather(e) for p in inner_jaxprs(eqn) for e in open_jaxpr(p).eqns)
        return eqn.primitive.name == "all_gather" or (eqn.primitive.name != "scan" and inner)

    return [eqn for eqn in body.eqns if has_gather(eqn)]


@pytest.mark.parametrize(("microbatches", "ahead"), [(4, 1), (2, 2)])
def test_per_repeat_gathers_the_next_repeat_during_the_iterations_of_this_one(microbatches, ahead):
    """With as many microbatches as stages a whole repeat ahead."""
    step = traced(
        f"schedule=circular fsdp_gather=per_repeat num_microbatches={microbatches} num_repeats=4 "
        "num_layers=8 stage=2 fsdp=2"
    )
    repeats = [body for body in loop_bodies(step) if gathers(body)]
    assert len(repeats) == 2  # of the forward and of the backward
    for body in repeats:
        steady, switch = (eqn for eqn in body.eqns if eqn.primitive.name == "scan")
        assert not needs(body, [steady], gathers(body))
        assert needs(body, [switch], gathers(body)) == (ahead == 1)
        # Nor may XLA start all gathers at once: each reads the activations of the loop state.
        before = ancestors(body.eqns, [v for eqn in gathers(body) for v in eqn.invars])
        activations = (SEQUENCE_LENGTH, TINY["model.embed_dim"])
        read = read_by(before, ()).keys() & set(body.invars)
        assert any(v.aval.shape[-2:] == activations for v in read)


# Two stages; heads of 128 and a batch that fills tiles, for a TPU.
SMALL = (
    "compile.topology=v5p:2x2x2",
    "model.num_layers=2",
    "model.embed_dim=512",
    "model.mlp_dim=512",
    "model.num_query_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=128",
    "model.vocab_size=1024",
    "model.dtype=bfloat16",
    "data.sequence_length=512",
    "data.global_batch_size=32",
    "pipeline.num_repeats=1",
    "pipeline.num_microbatches=4",
    "pipeline.remat_policy=minimal",
)
DENSE = ("mesh.ici.fsdp=1", "mesh.ici.data=4")
FLAGS = {RECOMMENDED["v5p"].variable: added_to("", RECOMMENDED["v5p"].flags)}


def scheduled_tick(directory, *words):
    hlo = directory / "step.hlo"
    report_of(directory, "configs/base.yml", *SMALL, *words, "--hlo", hlo, environment=FLAGS)
    ticks = [
        [(slot_by_name(i), i) for i in computation.instructions.values()]
        for computation in parse(hlo.read_text()).computations.values()
    ]
    return max(ticks, key=lambda tick: min(sum(s == slot for s, _ in tick) for slot in SLOTS[::2]))


def slot_by_name(instruction):
    name = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return next((s for s in re.findall(r"\w+", name[1]) if s in SLOTS), None) if name else None


def is_work(instruction):
    return instruction.opcode in ("fusion", "custom-call") and "estimated" in instruction.attributes


def waiting_for(tick, slots):
    names = {i.name for slot, i in tick if slot in slots and is_product(i)}
    for _, instruction in tick:  # operands come first
        if names & {*instruction.operands}:
            names.add(instruction.name)
    return names


def is_product(instruction):
    name = re.search(r'op_name="[^"]*/(dot_general|pallas_call)"', instruction.attributes)
    return is_work(instruction) and name is not None


class TestTpu:
    pytestmark = tpu_aot

    @pytest.mark.slow
    @pytest.mark.parametrize("overlap", ["true", "false"])
    def test_compiled_backward_slot_waits_for_the_forward_unless_slots_overlap(
        self, tmp_path, overlap
    ):
        """Of what XLA has made of both: it likes to fuse a read with a write of the same store."""
        tick = scheduled_tick(tmp_path, *DENSE, f"pipeline.overlap_slots={overlap}")
        waiting = waiting_for(tick, ("forward", "head"))
        backward = [i.name for slot, i in tick if slot == "backward" and is_product(i)]
        assert len(backward) > 5
        assert any(name in waiting for name in backward) == (overlap == "false")
