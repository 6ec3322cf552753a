"""Steps that MaxText wrote become parameters: its logits, in any layout, or every problem."""

import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh
from helpers.hf_folder import write_tokenizer
from helpers.hf_parameters import last_layer_output
from helpers.maxtext_steps import CASES, COMMON, GOLDEN, LOGITS, STEP, tokens

from maxpipe.builder import build_trainer
from maxpipe.config import ConfigError, replace, resolve
from maxpipe.migration.configuration import translate
from maxpipe.migration.orbax_arrays import find_item
from maxpipe.migration.read import read_maxtext
from maxpipe.migration.stored_model import Parameter, StoredModel
from maxpipe.migration.weights import MaxTextWeights
from maxpipe.model.program import ModelProgram

TOLERANCE = 2e-5  # of the largest logit


@pytest.fixture
def config_of(tmp_path):
    """config_of(name, key=value, ...) -> the configuration of `maxpipe.from_maxtext`, with weights.

    The tokenizer is a small one, because the models know few ids.
    """

    def _config_of(name, num_devices=1, **values):
        words = {**COMMON, **CASES[name], "vocab_size": 512, "ici_fsdp_parallelism": 1}
        words |= {"per_device_batch_size": 8, "dataset_type": "synthetic", "hardware": "cpu"}
        theirs = read_maxtext([], [f"{key}={value}" for key, value in words.items()])
        config = translate(theirs, 1).config
        tiny = {"model.vocab_size": COMMON["vocab_size"], "mesh.simulated_devices": 0}
        tiny |= {"data.tokenizer": str(write_tokenizer(tmp_path / "tokenizer"))}
        tiny |= {"init_from": f"maxtext:{GOLDEN / name / str(STEP)}", "compile.cache_dir": "off"}
        return resolve(replace(config, **{**tiny, **values}), num_devices)

    return _config_of


def parameters_of(config):
    program, weights = ModelProgram(config.model), MaxTextWeights(config)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layers = config.model.num_layers

    def read(path, spec):
        names = tuple(key.key for key in path)
        shape = (layers, *spec.shape) if names[0] == "layers" else spec.shape
        return weights.read(names, jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding))

    specs = program.specs
    return jax.tree_util.tree_map_with_path(read, specs, is_leaf=lambda s: hasattr(s, "axes"))


def logits_of(config):
    """Return logits of `tokens`, float32 [tokens, V].

    MaxText rounds a tied table to bfloat16 for logits, whatever the dtype, but not for embeddings.
    """
    program = ModelProgram(config.model)

    @jax.jit
    def forward(params, text):
        x = last_layer_output(program, params, text)
        if config.model.tie_embeddings:
            rounded = params["embed"]["embedding"].astype(jnp.bfloat16).astype(jnp.float32)
            params = {**params, "embed": {"embedding": rounded}}
        return program.logits(params, x)

    return np.asarray(forward(program.cast(parameters_of(config)), jnp.asarray(tokens())))[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_maxtext(config_of, name):
    """Scanned along either axis or not, OCDBT or not, either zarr, bfloat16 or not."""
    golden = np.asarray(json.loads((GOLDEN / name / LOGITS).read_text()))
    difference = logits_of(config_of(name))[::3] - golden
    assert np.abs(difference).max() <= TOLERANCE * np.abs(golden).max()


def test_rotation_of_neighbours_gives_the_same_logits_without_reordering(config_of):
    ours = [logits_of(config_of("llama3", **{"model.rope_interleaved": b})) for b in (True, False)]
    assert np.abs(ours[0] - ours[1]).max() <= TOLERANCE * np.abs(ours[0]).max()


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_trainer_has_the_weights_in_any_layout(config_of, name):
    layout = {"mesh.ici.stage": 2, "mesh.ici.fsdp": 2, "mesh.ici.tensor": 2}
    layout |= {"pipeline.layers_per_stage": [1, 2], "pipeline.num_microbatches": 4}
    layout |= {"pipeline.scan_layers": True}  # one file says false, which is not for stages
    layout |= {"model.vocab_size": 64, "model.unpadded_vocab_size": 32}
    config = config_of(name, 8, **layout)
    trainer = build_trainer(config, make_mesh(config), note=lambda line: None)
    weights = MaxTextWeights(config)
    state = trainer.replace_parameters(trainer.init(jax.random.key(0)), weights.read)
    params = jax.tree.map(np.asarray, trainer.to_canonical(state).params)
    padded = params["embed"]["embedding"]
    assert padded.shape[0] == 64
    assert not padded[32:].any()
    params["embed"]["embedding"] = padded[:32]
    if "kernel" in params["head"]:
        params["head"]["kernel"] = params["head"]["kernel"][:, :32]
    jax.tree.map(np.testing.assert_array_equal, params, {**parameters_of(config_of(name))})


def test_all_arrays_that_do_not_fit_are_named_at_once(config_of):
    config = config_of("qwen3", **{"model.num_layers": 4, "model.mlp_dim": 25})
    config = replace(config, **{"model.qk_norm": False})
    with pytest.raises(ConfigError) as caught:
        MaxTextWeights(config)
    lines = [problem.message.partition(": ")[2] for problem in caught.value.problems]
    assert {problem.key for problem in caught.value.problems} == {"init_from"}
    assert lines[0] == "decoder.layers_0.self_attention.key_norm.scale is not part of the model"
    assert "decoder.layers_3.mlp.wo.kernel is missing" in lines
    assert "decoder.layers_1.mlp.wi_0.kernel has shape [16, 24], the model [16, 25]" in lines
    assert len(lines) == 3 * 2 + 9 + 3 * 3


def test_options_that_no_block_of_maxtext_has_are_refused(config_of):
    values = {"model.norm_offset": True, "model.query_scale": 0.5}
    with pytest.raises(ConfigError) as caught:
        MaxTextWeights(config_of("llama2", **values))
    assert [problem.key for problem in caught.value.problems] == [*values]
    with pytest.raises(ConfigError, match=r"the model has layers.mlp.down_bias, layers.mlp.gate_"):
        MaxTextWeights(config_of("llama2", **{"model.mlp_bias": True}))


def test_fused_and_pipelined_arrays_are_refused_with_the_reason():
    dtype = SimpleNamespace(name="int32", numpy_dtype=np.dtype("int32"))
    array = SimpleNamespace(shape=(4,), dtype=dtype, ndim=1)
    names = ("decoder_norm.scale", "layers.self_attention.qkv_proj.kernel", "layers.mlp.wi.kernel")
    names += ("pipeline_module.layers.mlp.wo.kernel",)
    arrays = {f"decoder.{name}": array for name in names}
    norm = {("head", "norm", "scale"): Parameter("decoder.decoder_norm.scale", (4,))}
    reasons = [line.partition(": ")[2] for line in StoredModel(arrays, norm, 3, 8).differences[:3]]
    assert reasons[0] == "fused_mlp is not read"
    assert reasons[1].startswith("under fused_qkv heads lie")
    assert reasons[2].startswith("stages of a pipeline are not read")
    assert "is int32; only" in StoredModel(arrays, norm, 3, 8).differences[3]


def test_directory_without_a_step_is_refused_with_what_to_give(tmp_path):
    item = GOLDEN / "llama2" / str(STEP) / "items"
    assert find_item(item) == find_item(item.parent) == item
    with pytest.raises(ValueError, match="there is no directory"):
        find_item(tmp_path / "x")
    with pytest.raises(ValueError, match="give the directory of a step"):
        find_item(tmp_path)
    for step in ("9", "10"):
        shutil.copytree(item.parent, tmp_path / step)
    with pytest.raises(ValueError, match=r"is a directory of steps; give a step in it, as .*/10$"):
        find_item(tmp_path)


def test_damage_is_refused(config_of, tmp_path):
    step = shutil.copytree(GOLDEN / "llama2" / str(STEP), tmp_path / "step")
    config = config_of("llama2", init_from=f"maxtext:{step}")
    for file in (step / "items").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match="cannot read"):
        parameters_of(config)
    (step / "items" / "_METADATA").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        MaxTextWeights(config)


def test_numbers_that_are_not_finite_are_refused_by_name(config_of, monkeypatch):
    read = StoredModel.read
    monkeypatch.setattr(StoredModel, "read", lambda *arguments: read(*arguments) * np.nan)
    with pytest.raises(ConfigError, match=r"^init_from: \S* has NaN or infinity"):
        parameters_of(config_of("llama2"))
