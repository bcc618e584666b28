#!/usr/bin/python3
"""Makes the golden fixtures: tiny models trained for 20 steps by PyTorch, for golden_test.cc.

    apt-get install python3-torch && /usr/bin/python3 tests/golden/make_golden.py tests/golden

Each fixture NAME is NAME.safetensors (initial weights under Muster's names) and NAME.json (model,
optimizer, every batch, and per step the learning rate, mean loss and gradient norm). The models are
written here from their papers, in float64 and with separate q, k, v, gate and up matrices, so that
they share nothing with Muster but the mathematics.
"""
import json
import math
import struct
import sys

import torch
from torch import nn
from torch.nn import functional as F

STEPS, SAMPLES, LENGTH = 20, 4, 24


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


def rope_angles(model, positions):
    """Angles [N, D/2] with Llama 3.1's frequency scaling."""
    dim = model["head_dim"]
    frequencies = []
    for i in range(dim // 2):
        frequency = model["rope_theta"] ** (-2.0 * i / dim)
        if model["rope_scaling"] == "llama3":
            wavelength = 2 * math.pi / frequency
            low, high = model["rope_low_freq_factor"], model["rope_high_freq_factor"]
            original, factor = model["rope_original_positions"], model["rope_factor"]
            if wavelength > original / low:
                frequency /= factor
            elif wavelength >= original / high:
                smooth = (original / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)[None, :]


def rotate(x, angles):
    """x [N, H, D]: the first half of each head turns with the second."""
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        width, dim = model["width"], model["head_dim"]
        gpt2 = model["family"] == "gpt2"
        bias = gpt2 or model["qkv_bias"]
        self.q = nn.Linear(width, model["heads"] * dim, bias)
        self.k = nn.Linear(width, model["kv_heads"] * dim, bias)
        self.v = nn.Linear(width, model["kv_heads"] * dim, bias)
        self.out = nn.Linear(model["heads"] * dim, width, gpt2)
        if model["qk_norm"]:
            self.q_norm = RMSNorm(dim, model["norm_eps"])
            self.k_norm = RMSNorm(dim, model["norm_eps"])

    def forward(self, x, batch):
        model, dim = self.model, self.model["head_dim"]
        q = self.q(x).view(-1, model["heads"], dim)
        k = self.k(x).view(-1, model["kv_heads"], dim)
        v = self.v(x).view(-1, model["kv_heads"], dim)
        if model["qk_norm"]:
            q, k = self.q_norm(q), self.k_norm(k)
        if model["family"] == "llama":
            angles = rope_angles(model, batch["positions"])
            q, k = rotate(q, angles), rotate(k, angles)
        groups = model["heads"] // model["kv_heads"]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(dim)
        scores = scores.masked_fill(~batch["visible"], float("-inf"))
        return self.out(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1))


class Mlp(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.gpt2 = model["family"] == "gpt2"
        self.up = nn.Linear(model["width"], model["ffn"], self.gpt2)
        if not self.gpt2:
            self.gate = nn.Linear(model["width"], model["ffn"], False)
        self.down = nn.Linear(model["ffn"], model["width"], self.gpt2)

    def forward(self, x):
        if not self.gpt2:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        u = self.up(x)
        inner = math.sqrt(2 / math.pi) * (u + 0.044715 * u.pow(3))
        return self.down(0.5 * u * (1 + inner.tanh()))


def make_norm(model):
    kind = nn.LayerNorm if model["family"] == "gpt2" else RMSNorm
    return kind(model["width"], eps=model["norm_eps"])


class Block(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.attention_norm, self.attention = make_norm(model), Attention(model)
        self.mlp_norm, self.mlp = make_norm(model), Mlp(model)

    def forward(self, x, batch):
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens = nn.Embedding(model["vocab_size"], model["width"])
        self.positions = None
        if model["family"] == "gpt2":
            self.positions = nn.Embedding(model["max_positions"], model["width"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["layers"]))
        self.norm = make_norm(model)
        self.head = nn.Linear(model["width"], model["vocab_size"], False)
        if model["tie_embeddings"]:
            self.head.weight = self.tokens.weight

    def forward(self, batch):
        x = self.tokens(batch["tokens"])
        if self.positions is not None:
            x = x + self.positions(batch["positions"])
        for block in self.blocks:
            x = block(x, batch)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits, batch["targets"], ignore_index=-1, reduction="mean")


def muster_parameters(net, model):
    """The parameters under Muster's names, as lists of what is stacked there: q, k, v and gate, up."""
    parameters = {"embedding.tokens.weight": [net.tokens.weight]}
    if net.positions is not None:
        parameters["embedding.positions.weight"] = [net.positions.weight]

    def put(name, *layers):
        for part in ("weight", "bias"):
            if getattr(layers[0], part, None) is not None:
                parameters[f"{name}.{part}"] = [getattr(layer, part) for layer in layers]

    for i, block in enumerate(net.blocks):
        a, m, prefix = block.attention, block.mlp, f"blocks.{i}."
        put(prefix + "attention_norm", block.attention_norm)
        put(prefix + "attention.qkv", a.q, a.k, a.v)
        put(prefix + "attention.out", a.out)
        if model["qk_norm"]:
            put(prefix + "attention.q_norm", a.q_norm)
            put(prefix + "attention.k_norm", a.k_norm)
        put(prefix + "mlp_norm", block.mlp_norm)
        if model["family"] == "gpt2":
            put(prefix + "mlp.up", m.up)
        else:
            put(prefix + "mlp.gate_up", m.gate, m.up)
        put(prefix + "mlp.down", m.down)
    put("head.norm", net.norm)
    if not model["tie_embeddings"]:
        parameters["head.weight"] = [net.head.weight]
    return parameters


def save_safetensors(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = struct.pack(f"<{tensor.numel()}f", *tensor.detach().flatten().tolist())
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def make_batch(model, generator):
    """Samples packed from documents that count upwards with a stride, so that there is something
    to learn; the last token of a document has no target."""
    tokens, targets, positions, cu_seqlens = [], [], [], [0]

    def draw(n):
        return int(torch.randint(n, (1,), generator=generator))

    for _ in range(SAMPLES):
        left = LENGTH
        while left:
            length = min(left, 1 + draw(LENGTH))
            start, stride = draw(model["vocab_size"]), 1 + draw(3)
            document = [(start + i * stride) % model["vocab_size"] for i in range(length)]
            tokens += document
            targets += document[1:] + [-1]
            positions += range(length)
            cu_seqlens.append(len(tokens))
            left -= length
    return {"tokens": tokens, "targets": targets, "positions": positions, "cu_seqlens": cu_seqlens}


def to_tensors(batch, model):
    document = torch.zeros(len(batch["tokens"]), dtype=torch.long)
    for start in batch["cu_seqlens"][1:-1]:
        document[start:] += 1
    visible = document[:, None] == document[None, :]
    if model["causal"]:
        visible &= torch.ones_like(visible).tril()
    tensors = {key: torch.tensor(batch[key]) for key in ("tokens", "targets", "positions")}
    return {**tensors, "visible": visible}


def learning_rate(step, steps, optimizer, schedule):
    """Of step 1, 2, … of `steps`: linear warm-up, then a cosine down to min_lr_ratio at the last."""
    warmup, ratio = schedule["warmup_steps"], schedule["min_lr_ratio"]
    if step <= warmup:
        return optimizer["lr"] * step / warmup
    done = (step - warmup) / (steps - warmup)
    return optimizer["lr"] * (ratio + (1 - ratio) * (1 + math.cos(math.pi * done)) / 2)


def make_adamw(net, optimizer):
    """Weight decay on matrices alone."""
    parameters = list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2],
         "weight_decay": optimizer["weight_decay"]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(optimizer["beta1"], optimizer["beta2"]),
                             eps=optimizer["eps"])


def make(folder, name, seed, model):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    net = Transformer(model)
    with torch.no_grad():
        for parameter in net.parameters():
            # Away from ones and zeros, so that every parameter matters from the first step.
            if parameter.dim() == 2:
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    weights = {key: torch.cat(parts) for key, parts in muster_parameters(net, model).items()}
    save_safetensors(f"{folder}/{name}.safetensors", weights)
    net = net.double()

    optimizer = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
                 "clip_norm": 1.0}
    schedule = {"type": "cosine", "warmup_steps": 5, "min_lr_ratio": 0.1}
    parameters = list(net.parameters())
    adamw = make_adamw(net, optimizer)
    steps = []
    for step in range(1, STEPS + 1):
        batch = make_batch(model, generator)
        lr = learning_rate(step, STEPS, optimizer, schedule)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.zero_grad()
        loss = net(to_tensors(batch, model))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, optimizer["clip_norm"])
        adamw.step()
        steps.append({**batch, "lr": lr, "loss": loss.item(), "grad_norm": norm.item()})
    print(f"{name}: loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}, norms",
          " ".join(f"{s['grad_norm']:.2f}" for s in steps))
    with open(f"{folder}/{name}.json", "w") as file:
        json.dump({"model": model, "optimizer": optimizer, "schedule": schedule,
                   "samples": SAMPLES, "sequence_length": LENGTH, "steps": steps}, file)
        file.write("\n")


COMMON = {"vocab_size": 61, "width": 32, "layers": 2, "heads": 4, "norm_eps": 1e-5, "causal": True,
          "qkv_bias": False, "qk_norm": False, "tie_embeddings": True, "rope_theta": 10000.0,
          "rope_scaling": "none", "rope_factor": 1.0, "rope_low_freq_factor": 1.0,
          "rope_high_freq_factor": 4.0, "rope_original_positions": 8192, "max_positions": 0}


def main():
    folder = sys.argv[1]
    torch.set_num_threads(1)
    make(folder, "llama", 1, {**COMMON, "family": "llama", "kv_heads": 2, "head_dim": 8, "ffn": 72})
    make(folder, "llama_options", 2,
         {**COMMON, "family": "llama", "kv_heads": 1, "head_dim": 10, "ffn": 56,
          "tie_embeddings": False, "qkv_bias": True, "qk_norm": True, "rope_theta": 500.0,
          "rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_positions": 64})
    make(folder, "gpt2", 3, {**COMMON, "family": "gpt2", "kv_heads": 4, "head_dim": 8, "ffn": 96,
                             "max_positions": LENGTH})


if __name__ == "__main__":
    main()
