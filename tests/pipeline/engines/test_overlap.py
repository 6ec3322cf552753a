"""What may run at the same time in a step, by the dependences of the traced program."""

import jax
import pytest
from helpers.engines import SEQUENCE_LENGTH, TINY, EngineUnderTest, make_batch, tiny

from maxpipe.pipeline.jaxprs import ancestors, inner_jaxprs, open_jaxpr, read_by

ROWS = 16


def traced(**values):
    """Trace the training step of a configuration."""
    subject = EngineUnderTest(tiny(**values | {"data.global_batch_size": ROWS}))
    return jax.make_jaxpr(subject.pipeline.loss_and_gradients)(
        subject.params, make_batch(ROWS), jax.random.key(0)
    )


def loops(program):
    """Yield the body of every scan, outer ones first."""
    for eqn in open_jaxpr(program).eqns:
        for inner in inner_jaxprs(eqn):
            if eqn.primitive.name == "scan":
                yield open_jaxpr(inner)
            yield from loops(inner)


SLOTS = ("forward", "head", "backward")


def slot_of(eqn):
    """Return the slot of a tick that an equation belongs to, or None."""
    return next((s for s in str(eqn.source_info.name_stack).split("/") if s in SLOTS), None)


def needs(body, eqns, sources):
    """Return whether some of the equations of a body depend on one of the sources."""
    before = ancestors(body.eqns, [v for eqn in eqns for v in eqn.invars])
    return any(eqn is source for eqn in before for source in sources)


@pytest.mark.parametrize("schedule", ["lockstep_1f1b", "lockstep_zb"])
@pytest.mark.parametrize("overlap", [False, True])
def test_backward_slot_waits_for_its_ticks_forward_unless_slots_overlap(schedule, overlap):
    step = traced(
        **{
            "pipeline.schedule": schedule,
            "pipeline.overlap_slots": overlap,
            "pipeline.num_microbatches": 4,
            "pipeline.num_repeats": 2,
            "pipeline.remat_policy": "minimal",
            "pipeline.scan_layers_per_stage": False,
            "mesh.ici.stage": 2,
        }
    )
    waits = []
    for body in loops(step):
        slots = {slot: [eqn for eqn in body.eqns if slot_of(eqn) == slot] for slot in SLOTS}
        if slots["forward"] and slots["backward"]:
            waits.append(needs(body, slots["backward"], slots["forward"] + slots["head"]))
    assert waits
    assert any(waits) is not overlap


def gathers(body):
    """Return the equations of a body, outside of its loops, that gather weights."""

    def has_gather(eqn):
        inner = any(has_gather(e) for p in inner_jaxprs(eqn) for e in open_jaxpr(p).eqns)
        return eqn.primitive.name == "all_gather" or (eqn.primitive.name != "scan" and inner)

    return [eqn for eqn in body.eqns if has_gather(eqn)]


@pytest.mark.parametrize(("microbatches", "ahead"), [(4, 1), (2, 2)])
def test_per_repeat_gathers_the_next_repeat_during_the_iterations_of_this_one(microbatches, ahead):
    """With as many microbatches as stages a whole repeat ahead."""
    step = traced(
        **{
            "pipeline.engine": "circular",
            "pipeline.fsdp_gather": "per_repeat",
            "pipeline.num_microbatches": microbatches,
            "pipeline.num_repeats": 4,
            "model.num_layers": 8,
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
        }
    )
    repeats = [body for body in loops(step) if gathers(body)]
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
