"""What the two halves of a backward hand over in the program of the real model."""

import pytest
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "values", [{}, {"model.tie_embeddings": True, "pipeline.remat_policy": "none"}]
)
def test_no_gradient_of_a_parameter_waits_for_its_w(dtype, values):
    """Activations are [4, 8, ...] here, and no parameter is."""
    config = tiny(
        **{
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
            "pipeline.schedule": "zb_h1",
            "pipeline.num_microbatches": 4,
            "model.dtype": dtype,
            **values,
        }
    )
    program = build_trainer(config, make_mesh(config)).engine.training.program
    layouts = {shape for v in program.inputs for shape in (v.aval.shape, v.aval.shape[1:])}
    halves = [c for c in program.computations.values() if c.name.kind == "I"]
    assert [c.name.chunk for c in halves] == [1, 0]
    for half in halves:
        assert half.writes
        assert not half.outputs
        assert layouts.isdisjoint(v.aval.shape for v in half.writes)
