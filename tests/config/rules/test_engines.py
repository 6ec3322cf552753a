"""Options that an engine does not have are refused with the reason and a remedy."""

import re

CIRCULAR = "pipeline.schedule=circular"
LOCKSTEP = "pipeline.schedule=lockstep_1f1b"
MPMD = "pipeline.schedule=zb_h1"
SPLIT = "pipeline.schedule=lockstep_zb"
OFFLOADED = "pipeline.remat_policy=minimal_offloaded"
CUSTOM = "pipeline.remat_policy=custom"

# Words -> key: remedies or reasons.
REFUSED = """\
pipeline.schedule=circular pipeline.overlap_slots=true -> overlap_slots: lockstep_1f1b
pipeline.schedule=circular pipeline.skip_idle=true -> skip_idle: pipeline.schedule=lockstep_1f1b
pipeline.schedule=circular pipeline.remat_tensors.mlp_up=device -> remat_tensors.mlp_up: only with
    custom
pipeline.schedule=circular pipeline.remat_layers=true pipeline.remat_policy=none -> remat_layers: no
    effect with pipeline.remat_policy=none, only with custom, full
pipeline.schedule=circular pipeline.scan_repeats=false -> scan_repeats: needs
    pipeline.fsdp_gather=per_r
pipeline.schedule=circular pipeline.fsdp_prefetch=true -> fsdp_prefetch: use
    pipeline.fsdp_gather=per_repeat
pipeline.schedule=circular pipeline.outside_layers=before -> outside_layers: parallel_layers
pipeline.schedule=lockstep_1f1b pipeline.scan_iterations=false -> scan_iterations: use true
pipeline.schedule=lockstep_1f1b pipeline.scan_repeats=false -> scan_repeats: use true
pipeline.schedule=lockstep_1f1b pipeline.scan_layers=false -> scan_layers:
    pipeline.scan_layers_per_stage=f
pipeline.schedule=lockstep_1f1b pipeline.fsdp_prefetch=true pipeline.fsdp_gather=once ->
    fsdp_prefetch: gather=per_iteration
pipeline.schedule=lockstep_1f1b pipeline.fsdp_prefetch=true pipeline.scan_layers_per_stage=true ->
    fsdp_prefetch: needs pipeline.scan_layers_per_stage=false
pipeline.schedule=lockstep_1f1b pipeline.remat_policy=minimal_offloaded -> remat_policy: use
    minimal, or pipeline.schedule=circular or 1f
pipeline.schedule=lockstep_1f1b pipeline.remat_policy=custom pipeline.remat_tensors.context=offload
    -> remat_tensors.context: use device or r
pipeline.schedule=lockstep_1f1b pipeline.fsdp_gather=per_repeat -> fsdp_gather: use per_iteration,
    once
pipeline.schedule=zb_h1 pipeline.parallel_layers=4 pipeline.layers_per_stage=auto ->
    layers_per_stage: use pipeline.parallel_layers=-1
pipeline.schedule=zb_h1 pipeline.overlap_slots=true -> overlap_slots: lockstep_1f1b
pipeline.schedule=zb_h1 pipeline.fsdp_gather=per_repeat -> fsdp_gather: use once
pipeline.schedule=zb_h1 pipeline.scan_iterations=false -> scan_iterations: use true
pipeline.schedule=zb_h1 pipeline.scan_layers_per_stage=true -> scan_layers_per_stage: use false
pipeline.schedule=zb_h1 pipeline.delay_activation_forwarding=true -> delay_activation_forwarding:
    false
pipeline.schedule=lockstep_zb pipeline.scan_layers_per_stage=true pipeline.remat_policy=minimal ->
    scan_layers_per_stage: use false
pipeline.schedule=lockstep_zb pipeline.remat_policy=full -> remat_policy: use minimal, or custom
    with
pipeline.schedule=lockstep_zb pipeline.remat_policy=custom -> remat_policy: keeps no result of a
    matrix product
pipeline.schedule=zb_h1 pipeline.unit_times=[1,1.4] -> unit_times: such as [1, 1.4, 0.9, 0.1]
pipeline.schedule=zb_h1 pipeline.unit_times=[1,0,0.9] -> unit_times: such as [1, 1.4, 0.9, 0.1]
pipeline.schedule=circular pipeline.parallel_layers=12 -> parallel_layers: -1 = all layers
pipeline.schedule=circular pipeline.parallel_layers=0 -> parallel_layers: at least 1, or -1
pipeline.schedule=circular pipeline.parallel_layers=5 -> parallel_layers: parallel_layers=4 or 6
"""


def test_options_without_meaning_for_an_engine_are_refused_alone_with_a_remedy(unlike, problems):
    assert unlike(re.sub(r"->\s+", "-> pipeline.", REFUSED), alone=True) == {}
    assert "leave it empty" in problems(MPMD, "compile.load=step")["compile.load"]


def test_backwards_and_offloads_that_an_engine_can_do_are_accepted(problems):
    accepted = [
        f"{SPLIT} pipeline.remat_policy=save_qkv_proj",
        f"{SPLIT} {CUSTOM} pipeline.remat_tensors.mlp_up=device",
        f"{SPLIT} pipeline.remat_iterations=false",
        f"{MPMD} pipeline.remat_policy=full",
    ]
    for schedule in (CIRCULAR, MPMD):
        accepted += [f"{schedule} {OFFLOADED}"]
        accepted += [f"{schedule} {CUSTOM} pipeline.remat_tensors.context=offload"]
    assert [words for words in accepted if problems(*words.split())] == []


def test_layers_indivisible_propose_layers_outside_except_on_mpmd(problems):
    message = problems(CIRCULAR, "model.num_layers=7")["model.num_layers"]
    assert "model.num_layers=6 or 8" in message
    assert "pipeline.parallel_layers=6" in message
    message = problems(MPMD, "model.num_layers=7")["model.num_layers"]
    assert "pipeline.layers_per_stage=[4,3]" in message
    assert "pipeline.parallel_layers" not in message


def test_notes_name_layers_outside_the_pipeline(noted):
    beside = "the stages as data parallelism"
    table = {CIRCULAR: beside, LOCKSTEP: beside, MPMD: "the last chunk, on its stage alone"}
    for schedule, how in table.items():
        line = f"4 of 8 layers run after the pipeline, with {how}"
        assert line in str(noted(schedule, "pipeline.parallel_layers=4"))
        assert "run after the pipeline" not in str(noted(schedule))
    for rows, idles in ((3, True), (4, False)):
        words = ["pipeline.parallel_layers=4", "pipeline.num_microbatches=2", "mesh.ici.data=2"]
        words += ["mesh.ici.fsdp=1", f"data.global_batch_size={4 * rows}"]
        assert (f"2 stages do not divide {rows} rows" in str(noted(LOCKSTEP, *words))) == idles
