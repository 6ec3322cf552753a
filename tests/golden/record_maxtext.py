"""Records steps that MaxText trains and writes, and its logits of them: needs MaxText 0.2.5.

JAX_PLATFORMS=cpu python tests/golden/record_maxtext.py           all cases
JAX_PLATFORMS=cpu python tests/golden/record_maxtext.py NAME ...  some
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import maxtext
import numpy as np
from helpers.maxtext_steps import CASES, COMMON, GOLDEN, LOGITS, STEP, tokens
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import model_creation_utils

# What says how MaxText runs, not what the model is
RUN = (
    "hardware=cpu skip_jax_distributed_system=True jax_cache_dir= dataset_type=synthetic "
    "packing=False steps=3 learning_rate=0.02 warmup_steps_fraction=0 async_checkpointing=False "
    "save_checkpoint_on_start=False per_device_batch_size=2 attention=dot_product "
    "enable_tensorboard=False log_config=False"
)


def arguments(name: str, directory: str, *more: str) -> list[str]:
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    words = [f"{key}={value}" for key, value in {**COMMON, **CASES[name]}.items()]
    place = (f"run_name={name}", f"base_output_directory={directory}")
    return ["train", str(base), *words, *RUN.split(), *place, *more]


def record(name: str, directory: str) -> None:
    """Train a case, copy its last step, and write the logits that MaxText has with it."""
    train.main(arguments(name, directory))
    written = Path(directory, name, "checkpoints", str(STEP))
    config = pyconfig.initialize(
        arguments(name, directory, f"load_parameters_path={written / 'items'}")
    )
    model, mesh = model_creation_utils.from_pretrained(config)
    text = jnp.asarray(tokens())
    positions = jnp.broadcast_to(jnp.arange(text.shape[1]), text.shape)
    with jax.set_mesh(mesh):
        how = {"enable_dropout": False, "model_mode": MODEL_MODE_TRAIN}
        logits = model(text, positions, decoder_segment_ids=jnp.ones_like(text), **how)
    target = GOLDEN / name
    shutil.rmtree(target, ignore_errors=True)
    # What does not belong to the weights: shardings, and states of random numbers
    unread = shutil.ignore_patterns("_sharding", "array_metadatas", "nnx_aux.*")
    shutil.copytree(written, target / str(STEP), ignore=unread)
    values = np.asarray(logits, np.float64)[0, ::3].round(6).tolist()
    (target / LOGITS).write_text(json.dumps(values) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for name in sys.argv[1:] or CASES:
            record(name, directory)
