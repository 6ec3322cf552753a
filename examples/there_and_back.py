"""Take a Llama from transformers through pipelines and back, and check that both agree.

    pip install -e ".[hf-test]"
    python examples/there_and_back.py            # further words are keys, such as steps=20

The model has the shape of SmolLM2-135M and random weights, so that nothing is downloaded. It is
trained further over two stages and two shards of every sequence, then fine-tuned with adapters
under another schedule, and exported. Takes a few minutes on two cores.
"""

import sys

import numpy as np
import torch
import transformers

import maxpipe
from maxpipe import export

# 1. A folder as it comes from the hub.
shape = transformers.LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
)  # fmt: skip
transformers.LlamaForCausalLM(shape).save_pretrained("models/smollm2")

# 2. Train further: 1F1B over two stages, each sequence split over two devices.
words = ["steps=5", "eval.every=0", "data.sequence_length=64", "data.tokenizer=byte", *sys.argv[1:]]
keys = ["init_from=hf:models/smollm2", "model.from_hf=models/smollm2", "run_name=further"]
mesh = ["mesh.ici.stage=2", "mesh.ici.fsdp=1", "mesh.ici.context=2", "pipeline.num_repeats=1"]
further = maxpipe.Run(maxpipe.load_config("base", *keys, *mesh, *words))
further.train()

# 3. Fine-tune adapters with zero bubble, from the weights of that run.
keys = ["base_model=run:runs/further", "model.lora.rank=8", "run_name=adapters"]
mesh = ["mesh.ici.stage=2", "pipeline.schedule=zb_h1", "pipeline.num_repeats=1"]
maxpipe.Run(maxpipe.load_config("base", *keys, *mesh, *words)).train()

# 4. Export with the adapters merged, and compare logits.
export.main(["runs/adapters", "--hf", "models/merged"])
tokens = [[100, 101, 102, 103]]
ours = np.asarray(maxpipe.load_model("runs/adapters").logits(tokens))
model = transformers.LlamaForCausalLM.from_pretrained("models/merged")
theirs = model(torch.tensor(tokens)).logits.detach().numpy()
print(f"largest difference of logits: {abs(ours - theirs).max():.1e} of {abs(theirs).max():.1f}")
