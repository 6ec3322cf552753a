"""Train in Python, look at losses while they come, and use the model.

    python examples/train_in_python.py steps=60

What a notebook would have in four cells: draw schedules, train with a callback, look at what the
model predicts, and let it write. Words are keys of the configuration, as for `maxpipe.train`. The
run goes to runs/base, as that of `python -m maxpipe.train base` does.
"""

import sys

import numpy as np

import maxpipe

# 1. Schedules need no JAX. The last line of a notebook's cell draws them as charts.
schedules = maxpipe.schedule("lockstep_1f1b", "circular", stages=2, microbatches=2, repeats=2)
print(schedules, end="\n\n")

# 2. Train. The run makes its four simulated devices itself, since nothing has used JAX yet.
config = maxpipe.load_config("base", *sys.argv[1:])
run = maxpipe.Run(config)
losses: list[float] = []


def look(step: int, metrics: dict[str, float]) -> None:
    """Keep the losses, and print some of them."""
    losses.append(metrics["loss"])
    if step % 20 == 0 or step == config.steps:
        largest = float(abs(run.state.params["head"]["kernel"]).max())
        print(f"callback    step {step}: loss {losses[-1]:.4f}, largest weight {largest:.3f}")


run.train(callback=look)

# 3. What comes after "def "? Logits are [B, T, V]; the last token's are of the next byte.
model = maxpipe.load_model(run.directory)
tokens = model.tokenizer.encode("def ")
logits = model.logits([tokens])
likely = np.argsort(-np.asarray(logits)[0, -1])[:5]
print("after 'def ':", [model.tokenizer.decode([token]) for token in likely])

# 4. Write.
print(model.generate("def ", max_tokens=60, seed=1))
