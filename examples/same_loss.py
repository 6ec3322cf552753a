"""Train one model in four ways, and draw four curves of loss that are one.

    python examples/same_loss.py            # further words are keys, such as steps=20

A hundred million parameters learn the source of Python's standard library, from the same weights
and batches: without stages, and over four stages under three schedules, each of another engine. All
compute in float32 on four simulated devices. Writes same_loss.svg. Takes a quarter of an hour on
two cores; with `model.embed_dim=64 model.mlp_dim=128` a few minutes.
"""

import sys
from pathlib import Path

import maxpipe

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import loss_curve

TOLERANCE = 1e-5  # of a step's loss, relative
MODEL = [
    *("model.num_layers=8", "model.embed_dim=1024", "model.mlp_dim=2816"),
    *("model.num_query_heads=8", "model.num_kv_heads=8"),
]
RUN = [
    *("steps=32", "data.sequence_length=64", "data.global_batch_size=8"),
    *("optimizer.learning_rate=1e-3", "pipeline.remat_policy=none"),
    *("eval.every=0", "checkpoint.every=0"),
]
STAGES = ["mesh.ici.stage=4", "mesh.ici.fsdp=1", "pipeline.num_repeats=2"]
WAYS = {
    "sequential": ["pipeline.engine=sequential", "mesh.ici.stage=1", "mesh.ici.fsdp=4"],
    "lockstep_1f1b": [*STAGES, "pipeline.schedule=lockstep_1f1b"],
    "circular": [*STAGES, "pipeline.schedule=circular"],
    "zb_v": [*STAGES, "pipeline.schedule=zb_v"],  # on the engine mpmd
}

losses: dict[str, list[float]] = {}
for name, way in WAYS.items():
    words = [*MODEL, *RUN, *way, f"run_name=same_loss-{name}", *sys.argv[1:]]
    run = maxpipe.Run(maxpipe.load_config("base", *words))
    run.train()
    losses[name] = [row["loss"] for row in run.history if "loss" in row]
    del run  # and with it the state on the devices

largest = 0.0
curves = []
for name, values in losses.items():
    pairs = zip(values, losses["sequential"], strict=True)
    difference = max(abs(value - expected) / expected for value, expected in pairs)
    largest = max(largest, difference)
    label = f"{name}, at most {difference:.1e} from sequential" if difference else name
    print(f"ends at {values[-1]:.6f}: {label}")
    curves.append(loss_curve.Run(label, [*enumerate(values, 1)], []))
Path("same_loss.svg").write_text(loss_curve.draw(curves, nested=True), encoding="utf-8")
print(f"largest difference of a loss: {largest:.1e}")
assert largest <= TOLERANCE
