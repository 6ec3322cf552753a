"""Check that a sliced program, a table and the stages' meshes fit together.

Meshes may differ in size, not in the names of their axes. So one PartitionSpec says how an array
lies on every stage.
"""

from collections.abc import Iterator, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.pipeline import jaxprs
from maxpipe.pipeline.engines.mpmd.program import SlicedProgram
from maxpipe.pipeline.schedules.table import Table
from maxpipe.sharding.rules import axes_of, split_counts


def check_program(program: SlicedProgram, table: Table) -> None:
    if program.num_chunks != table.num_chunks:
        raise ValueError(
            f"the function has {program.num_chunks} stage marks, but the table ({table.name}, "
            f"{table.num_stages} stages with {table.num_repeats} chunks each) needs "
            f"{table.num_chunks}; call mark_stage_boundary after each chunk, the last one "
            f"too, before the loss"
        )
    # The kinds of a program follow from whether it was differentiated, and how it was sliced.
    kinds = {name.kind for name in program.computations}
    if kinds == {"F"} and table.kinds != ("F",):
        raise ValueError(
            "no gradient passes through a stage mark, but the table has backwards; pass "
            "jax.value_and_grad(loss) with trained parameters before the first mark, or for an "
            "evaluation the table forward_only(table)"
        )
    if kinds != {"F"} and table.kinds == ("F",):
        raise ValueError(
            "the function has gradients, but the table has no backwards; pass the loss itself, or "
            "the table of a schedule"
        )
    # Only split backwards have units W.
    if ("W" in kinds) != ("W" in table.kinds):
        raise ValueError(
            f"the program is cut into {', '.join(sorted(kinds))}, but the table has "
            f"{', '.join(table.kinds)}; slice with split_backwards={'W' in table.kinds}"
        )


def check_meshes(meshes: Sequence[Mesh], table: Table) -> None:
    if len(meshes) != table.num_stages:
        raise ValueError(
            f"there are {len(meshes)} meshes, but the table ({table.name}) has {table.num_stages} "
            f"stages; give one mesh for each stage"
        )
    # One PartitionSpec says how an array lies before and after a transfer between stages.
    names = {mesh.axis_names for mesh in meshes}
    if len(names) > 1:
        listed = ", ".join(map(str, sorted(names)))
        raise ValueError(
            f"the meshes have the axes {listed}; give all the same names, with size 1 for an axis "
            f"that a stage does not use"
        )
    # Stages that share a device would take turns on it, which no schedule foresees.
    devices = [device for mesh in meshes for device in mesh.devices.flat]
    shared = sorted({str(device) for device in devices if devices.count(device) > 1})
    if shared:
        raise ValueError(
            f"several stages have {', '.join(shared)}; give each stage devices of its own "
            f"(jax.config.update('jax_num_cpu_devices', N) simulates N of them), or a stage "
            f"several chunks by a schedule with repeats"
        )
    foreign = sorted(str(d) for d in devices if d.process_index != jax.process_index())
    if foreign:
        raise ValueError(
            f"{foreign[0]} belongs to another process, but one process has to drive all stages; "
            f"give devices of jax.local_devices()"
        )


def check_layouts(program: ClosedJaxpr, meshes: Sequence[Mesh]) -> None:
    for eqn in _equations(program.jaxpr):
        if eqn.primitive.name == "sharding_constraint":
            mesh = getattr(eqn.params["sharding"], "mesh", None)
            remedy = "constrain to NamedSharding(meshes[0].abstract_mesh, spec)"
            # An abstract mesh stands for the mesh of whichever stage runs the equation.
            if isinstance(mesh, Mesh):
                raise ValueError(
                    f"a sharding constraint names the devices of one stage, but its code may run "
                    f"on another; {remedy}"
                )
        elif eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            remedy = "call jax.shard_map with mesh=meshes[0].abstract_mesh"
        else:
            continue
        # Sizes count here, unlike in a PartitionSpec: the equation was traced for so many devices.
        if mesh is not None and any(mesh.shape != stage_mesh.shape for stage_mesh in meshes):
            sizes = ", ".join(str(dict(stage_mesh.shape)) for stage_mesh in meshes)
            raise ValueError(
                f"{eqn.primitive.name} is for a mesh of {dict(mesh.shape)}, but those of the "
                f"stages are {sizes}; leave it out where stages differ in size, else {remedy}"
            )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from _equations(jaxprs.open_jaxpr(inner))


def layout(
    mesh: Mesh, spec: PartitionSpec, x: jax.ShapeDtypeStruct, name: str, stage: int
) -> NamedSharding:
    """Return a layout on a stage that a caller has chosen.

    Raises:
      ValueError: the spec is not one for the array, the mesh has no such axis, or the axes do not
        divide the array.
    """
    where = f"{name} {list(x.shape)} with {spec} on stage {stage}"
    if any(axis not in mesh.axis_names for axis in axes_of(spec)):
        raise ValueError(f"{where}: its mesh has the axes {', '.join(mesh.axis_names)}")
    # The caller has asked for these axes, so none may be left out silently.
    if fitted(spec, x.shape, mesh) != spec:
        raise ValueError(f"{where}: the mesh {dict(mesh.shape)} does not divide it")
    return NamedSharding(mesh, spec)


def fitted(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the spec without the axes that do not divide a dimension of `shape` on `mesh`."""
    counts = split_counts(spec, mesh, len(shape))
    fits = [length % count == 0 for count, length in zip(counts, shape, strict=False)]
    if all(fits):
        return spec
    return PartitionSpec(*(entry if fit else None for entry, fit in zip(spec, fits, strict=False)))
