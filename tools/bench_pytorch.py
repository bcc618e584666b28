#!/usr/bin/env python3
"""Trains a Llama-style model on random tokens with PyTorch on the CPU and prints its speed as JSON:
{"tokens_per_s": …, "step_s": …, "torch": …}. What `muster bench` compares itself with.

A step is forward, backward, clipping and AdamW of one batch, as PyTorch users write it: fused
scaled_dot_product_attention and fused AdamW where this version of PyTorch has them.
"""
import argparse
import json
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("PyTorch is missing: apt-get install python3-torch, then run this with /usr/bin/python3")
from torch import nn
from torch.nn import functional as F


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, meaning in [
        ("width", 128, "width of the residual stream"),
        ("layers", 4, "blocks"),
        ("heads", 4, "query heads"),
        ("kv-heads", 0, "key and value heads, 0 = heads"),
        ("ffn", 352, "width of the feed-forward layer"),
        ("sequence-length", 256, "tokens a sample"),
        ("batch", 8, "samples a step"),
        ("vocab", 257, "tokens of the vocabulary"),
        ("threads", 1, "compute threads"),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default,
                            help=f"{meaning} (default {default})")
    parser.add_argument("--seconds", type=float, default=5.0,
                        help="how long to measure (default 5)")
    arguments = parser.parse_args()
    arguments.kv_heads = arguments.kv_heads or arguments.heads
    return arguments


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def attend(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length = q.shape[-2]
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.heads, self.kv_heads, self.dim = a.heads, a.kv_heads, a.width // a.heads
        self.attention_norm, self.mlp_norm = RMSNorm(a.width), RMSNorm(a.width)
        self.qkv = nn.Linear(a.width, (a.heads + 2 * a.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(a.width, a.width, bias=False)
        self.gate_up = nn.Linear(a.width, 2 * a.ffn, bias=False)
        self.down = nn.Linear(a.ffn, a.width, bias=False)

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x, cos, sin):
        samples, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(samples, length, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if self.kv_heads != self.heads:
            groups = self.heads // self.kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = x + self.out(attend(q, k, v).transpose(1, 2).reshape(samples, length, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tokens = nn.Embedding(a.vocab, a.width)
        self.blocks = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.norm = RMSNorm(a.width)
        self.head = nn.Linear(a.width, a.vocab, bias=False)
        nn.init.normal_(self.tokens.weight, 0, 0.02)
        self.head.weight = self.tokens.weight
        dim = a.width // a.heads
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.arange(a.sequence_length).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_optimizer(net):
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    try:
        return torch.optim.AdamW(net.parameters(), fused=True, **options)
    except (TypeError, RuntimeError):  # before fused AdamW existed, or existed for the CPU
        return torch.optim.AdamW(net.parameters(), **options)


def main():
    a = parse_arguments()
    torch.set_num_threads(a.threads)
    torch.manual_seed(1)
    net = Llama(a)
    optimizer = make_optimizer(net)
    shape = (a.batch, a.sequence_length)
    tokens, targets = torch.randint(a.vocab, shape), torch.randint(a.vocab, shape)

    def step():
        optimizer.zero_grad(set_to_none=True)
        net(tokens, targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    for _ in range(3):
        step()
    durations = []
    end = time.perf_counter() + a.seconds
    while time.perf_counter() < end or len(durations) < 3:
        begin = time.perf_counter()
        step()
        durations.append(time.perf_counter() - begin)
    median = sorted(durations)[len(durations) // 2]
    print(json.dumps({"tokens_per_s": a.batch * a.sequence_length / median, "step_s": median,
                      "torch": torch.__version__}))


if __name__ == "__main__":
    main()
