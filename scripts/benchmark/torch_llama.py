"""Train the model of `gpu.py` in plain PyTorch, as the yardstick.

What an experienced user would write first: torch.compile, scaled-dot-product attention, fused
AdamW, float32 parameters, matrix products in bfloat16 by autocast, gradients accumulated over
microbatches, no recomputation. Letters: B sequences, T tokens, D embed, H query heads, K key/value
heads, C head width.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def rotations(length: int, width: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary embedding, float32 [T, C / 2] each."""
    inverse = theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head, x [B, H, T, C]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            shape["num_heads"],
            shape["num_kv_heads"],
            shape["head_dim"],
        )
        embed = shape["embed_dim"]
        self.query = nn.Linear(embed, self.heads * self.width, bias=False)
        self.key = nn.Linear(embed, self.kv_heads * self.width, bias=False)
        self.value = nn.Linear(embed, self.kv_heads * self.width, bias=False)
        self.out = nn.Linear(self.heads * self.width, embed, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, T, D] -> [B, T, D]."""
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.key(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        v = self.value(x).view(batch, length, self.kv_heads, self.width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm and added to the residual stream."""

    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        embed, hidden = shape["embed_dim"], shape["mlp_dim"]
        self.attention_norm, self.mlp_norm = (
            nn.RMSNorm(embed, eps=1e-5),
            nn.RMSNorm(embed, eps=1e-5),
        )
        self.attention = Attention(shape)
        self.gate = nn.Linear(embed, hidden, bias=False)
        self.up = nn.Linear(embed, hidden, bias=False)
        self.down = nn.Linear(hidden, embed, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Decoder with untied embeddings; returns the mean cross-entropy."""

    def __init__(self, shape: dict[str, Any]):
        super().__init__()
        self.embedding = nn.Embedding(shape["vocab_size"], shape["embed_dim"])
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape["num_layers"]))
        self.norm = nn.RMSNorm(shape["embed_dim"], eps=1e-5)
        self.head = nn.Linear(shape["embed_dim"], shape["vocab_size"], bias=False)
        cos, sin = rotations(shape["sequence_length"], shape["head_dim"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets int64 [B, T] -> scalar."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def measure(shape: dict[str, Any], *, compiled: bool = True) -> dict[str, Any]:
    """Train on random tokens; return the median step, its device and its peak memory.

    Raises:
      ValueError: `need_gpu` and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if shape["need_gpu"] and not has_gpu:
        raise ValueError("--gpu: PyTorch finds no GPU")
    device = torch.device("cuda" if has_gpu else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Llama(shape).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=has_gpu
    )
    loss_of = torch.compile(model) if compiled else model
    size = (shape["batch_size"], shape["sequence_length"] + 1)
    rows = torch.randint(shape["vocab_size"], size, device=device)
    microbatches = rows.chunk(shape["num_microbatches"])
    seconds = []
    for _ in range(shape["steps"]):
        started = time.perf_counter()
        total = torch.zeros((), device=device)
        for micro in microbatches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(micro[:, :-1].contiguous(), micro[:, 1:].contiguous()) / len(
                    microbatches
                )
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if has_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    # The first step compiles, the second may still allocate.
    return {
        "step_seconds": statistics.median(seconds[2:]),
        "loss": float(total),
        "device_kind": torch.cuda.get_device_name() if has_gpu else "cpu",
        "peak_bytes": torch.cuda.max_memory_allocated() if has_gpu else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="One turn of PyTorch; scripts/benchmark/run.py --gpu starts it."
    )
    parser.add_argument("shape", type=json.loads)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    try:
        print(json.dumps(measure(options.shape, compiled=not options.eager)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
