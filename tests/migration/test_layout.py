"""Devices, mesh, pipeline and rematerialisation are MaxText's."""

from maxpipe.config import resolve
from maxpipe.config.catalog import MATMULS
from maxpipe.config.options import get

PIPELINE = [
    "base_num_decoder_layers=8",
    "per_device_batch_size=4",
    "ici_pipeline_parallelism=4",
    "ici_fsdp_parallelism=2",
    "num_pipeline_microbatches=8",
]


def test_pipeline_resolves_to_maxtexts_layout(translated):
    config = resolve(translated(*PIPELINE, devices=0).config, 8)
    assert (config.mesh.ici.stage, config.mesh.ici.fsdp, config.mesh.dcn.data) == (4, 2, 1)
    pipeline = config.pipeline
    assert (pipeline.engine, pipeline.schedule) == ("circular", "circular")
    assert (pipeline.num_repeats, pipeline.num_layers_per_stage) == (2, 1)
    assert (pipeline.num_microbatches, config.data.global_batch_size) == (8, 32)


def test_options_of_the_pipeline_are_kept(translated):
    table = {
        "num_layers_per_pipeline_stage=2": {"num_repeats": 1, "num_layers_per_stage": 2},
        "pipeline_parallel_layers=4": {"parallel_layers": 4, "num_repeats": 1},
        "pipeline_fsdp_ag_once=true": {"fsdp_gather": "once"},
        "pipeline_fsdp_ag_per_repeat=true": {"fsdp_gather": "per_repeat"},
        "pipeline_delay_activation_forwarding=true": {"delay_activation_forwarding": True},
        "scan_pipeline_iterations=false": {"scan_iterations": False},
        "scan_layers_per_stage=true": {"scan_layers_per_stage": True},
        "set_remat_policy_on_pipeline_iterations=false": {"remat_iterations": False},
        "set_remat_policy_on_layers_per_stage=true": {"remat_layers": True},
        "gradient_accumulation_steps=2": {"num_microbatches": 16},
    }
    configs = {word: resolve(translated(*PIPELINE, word).config, 8) for word in table}
    kept = {w: {k: get(configs[w], f"pipeline.{k}") for k in values} for w, values in table.items()}
    assert kept == table


def test_unrolled_layers_without_a_pipeline_stay_unrolled(translated):
    config = resolve(translated("scan_layers=false", "ici_fsdp_parallelism=8").config, 8)
    assert (config.pipeline.engine, config.pipeline.scan_layers) == ("sequential", False)


def test_policy_without_a_name_here_is_written_by_tensor(translated):
    attention = {"query_proj", "key_proj", "value_proj", "out_proj"}
    table = {
        "minimal": ({*MATMULS} - {"context"}, "device"),
        "minimal_offloaded": ({*MATMULS} - {"context"}, "offload"),
        "save_dot_with_context_except_mlp": (attention | {"context"}, "device"),
        "save_dot_except_mlpwi": (attention | {"mlp_down"}, "device"),
    }
    for policy, (saved, place) in table.items():
        pipeline = translated(f"remat_policy={policy}").config.pipeline
        assert pipeline.remat_policy == "custom"
        tensors = {name: getattr(pipeline.remat_tensors, name) for name in MATMULS}
        assert tensors == {name: place if name in saved else "remat" for name in MATMULS}, policy


def test_policy_with_a_name_here_keeps_it(translated):
    table = {"minimal_with_context": "minimal", "none": "none", "save_qkv_proj": "save_qkv_proj"}
    policies = {p: translated(f"remat_policy={p}").config.pipeline.remat_policy for p in table}
    assert policies == table


def test_custom_policy_keeps_the_places(translated):
    words = ["remat_policy=custom", "mlpwi_0=offload", "attention_out=device", "out_proj=remat"]
    tensors = translated(*words).config.pipeline.remat_tensors
    assert (tensors.mlp_gate, tensors.context, tensors.out_proj) == ("offload", "device", "remat")


def test_devices_are_those_of_the_topology(translated):
    table = {
        "v5p-16": (8, "v5p:2x2x2"),
        "v5e-256": (256, "v5e:16x16"),
        "v5p-16 compile_topology_num_slices=2": (16, "v5p:2x2x2"),
    }
    found = {}
    for slices in table:
        words = f"compile_topology={slices} per_device_batch_size=1".split()
        config = translated(*words, devices=0).config
        found[slices] = (config.data.global_batch_size, config.compile.topology)
    assert found == table
