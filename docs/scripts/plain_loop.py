"""Time `longhaul train` beside a plain PyTorch loop of the same model, processes in turns.

    python -P docs/scripts/plain_loop.py CASE...

A case is BLOCK:VOCABULARY, such as gpt2:320. gpt2 has LayerNorm, GELU and learned positions, llama
RMSNorm, SwiGLU and rotary positions. The loop has the structure of nanoGPT: fused attention and
AdamW, all logits at once, no documents. The working folder holds data/stdlib, which
`longhaul prepare text stdlib data/stdlib` writes, and gets one run. Medians leave out the first six
updates, during which longhaul imports its tracker. Memory is the peak of the process,
imports included.
"""

import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, CONTEXT, MICRO_BATCH, ACCUMULATION = 4, 192, 6, 512, 8, 2
TOKENS = MICRO_BATCH * ACCUMULATION * CONTEXT  # per update, as in run/demo.yaml
UPDATES, LEFT_OUT, ROUNDS = 16, 6, 3
RUN = Path("runs/beside-a-plain-loop")
BLOCKS = {
    "gpt2": (f"model.learned_positions={CONTEXT}",),
    "llama": ("model.norm=rms", "model.mlp=swiglu", "model.mlp_width=512"),
}


class Block(nn.Module):
    """Attention and MLP of one layer."""

    def __init__(self, is_llama: bool) -> None:
        super().__init__()
        hidden = 512 if is_llama else 4 * WIDTH
        self.norms = nn.ModuleList(norm(is_llama) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.gate = nn.Linear(WIDTH, hidden, bias=False) if is_llama else None
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        position = torch.arange(CONTEXT)[:, None]
        angle = position * 10_000.0 ** (-torch.arange(0, WIDTH // HEADS, 2) * HEADS / WIDTH)
        self.cos, self.sin = (one.repeat(1, 2) for one in (angle.cos(), angle.sin()))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).split(WIDTH, dim=2)
        q, k, v = (one.view(B, T, HEADS, -1).transpose(1, 2) for one in qkv)
        if self.gate is not None:
            q, k = self.rotate(q), self.rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, WIDTH))
        normed = self.norms[1](x)
        if self.gate is None:
            hidden = F.gelu(self.up(normed), approximate="tanh")
        else:
            hidden = F.silu(self.gate(normed)) * self.up(normed)
        result: Tensor = x + self.down(hidden)
        return result

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Model(nn.Module):
    """Mean loss of next tokens."""

    def __init__(self, is_llama: bool, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.positions = None if is_llama else nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(is_llama) for _ in range(LAYERS))
        self.norm = norm(is_llama)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def norm(is_llama: bool) -> nn.Module:
    return nn.RMSNorm(WIDTH, eps=1e-5) if is_llama else nn.LayerNorm(WIDTH, bias=False)


def train(block: str, vocabulary: str) -> None:
    """Print the median seconds of an update, and the peak of this process in bytes."""
    torch.manual_seed(0)
    paths = Path(json.__file__).parent.parent.glob("*.py")  # any bytes: only their number matters
    data = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    model = Model(block == "llama", int(vocabulary))
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    seconds = []
    for _ in range(UPDATES):
        began = time.perf_counter()
        for _ in range(ACCUMULATION):
            starts = torch.randint(len(data) - CONTEXT - 1, (MICRO_BATCH,)).tolist()
            rows = np.stack([data[at : at + CONTEXT + 1] for at in starts]).astype(np.int64)
            tokens = torch.from_numpy(rows)
            loss = model(tokens[:, :-1], tokens[:, 1:]) / ACCUMULATION
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(statistics.median(seconds[LEFT_OUT:]), peak)


def plain_loop(block: str, vocabulary: str) -> tuple[float, float]:
    command = [sys.executable, "-P", __file__, "train", block, vocabulary]
    run = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    seconds, peak = map(float, run.stdout.split())
    return seconds, peak


def longhaul(block: str, vocabulary: str, kind: str) -> tuple[float, float]:
    shutil.rmtree(RUN, ignore_errors=True)
    budget = UPDATES * TOKENS
    has_rotary = kind != "softmax" or block == "llama"
    attention = f"{{kind: {kind}}}" if has_rotary else f"{{kind: {kind}, rotary: none}}"
    settings = [
        f"name={RUN.name}", f"model.attention={attention}", f"model.vocabulary={vocabulary}",
        "model.embedding_norm=false", "data.document_mask=false", f"trainer.max_tokens={budget}",
        f"trainer.validate_every_tokens={budget}", f"checkpoint.every_tokens={budget}",
        f"optim.schedule.warmup_tokens={TOKENS}", f"optim.schedule.decay_tokens={TOKENS}",
        *BLOCKS[block],
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("longhaul")), "train", "run/demo.yaml"]
    subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    lines = (RUN / "logs" / "metrics.jsonl").read_text().splitlines()
    values = [one["values"] for one in map(json.loads, lines) if one["kind"] == "train"]
    seconds = [one["train/step_seconds"] for one in values]
    peak = max(one["train/peak_memory_bytes"] for one in values)
    return statistics.median(seconds[LEFT_OUT:]), peak


def main(*cases: str) -> None:
    if not cases:
        sys.exit(__doc__)
    for case in cases:
        block, vocabulary = case.split(":")
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):
            found.setdefault("plain loop", []).append(plain_loop(block, vocabulary))
            for kind in ("softmax", "conformal_sympow"):
                found.setdefault(kind, []).append(longhaul(block, vocabulary, kind))
        for name, rounds in found.items():
            seconds, peaks = zip(*rounds, strict=True)
            speed = TOKENS / statistics.median(seconds)
            print(f"{case} {name}: {speed:,.0f} tokens/s, {max(peaks) / 1e6:,.0f} MB", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
