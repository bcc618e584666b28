"""Muster's initial weights in PyTorch: common/rng.cc and initial_value() of worker/model/parameters.cc.

    python3 tests/golden/muster_init.py build/tools/muster/muster    checks them against a run's checkpoint
"""
import json
import math
import pathlib
import struct
import sys

import torch
import xxhash

ROOT = pathlib.Path(__file__).resolve().parents[2]
PIECE = 1 << 24  # elements computed at a time
WORD = 0xFFFFFFFF


def multiply(a, constant):
    """High and low word of the product of two 32-bit words, in int64 without overflow."""
    low_part = a * (constant & 0xFFFF)
    high = (a * (constant >> 16) + (low_part >> 16)) >> 16
    return high, (a * constant) & WORD  # the product wraps around, which leaves its low word right


def philox(key, counter):
    """Philox4x32-10 of four int64 tensors (or numbers) that hold 32-bit words, under a 64-bit key."""
    key0, key1 = key & WORD, key >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = multiply(c0, 0xD2511F53)
        high1, low1 = multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def unit(low, high):
    """[0, 1) from the upper 53 of 64 bits."""
    return ((high << 21) | (low >> 11)).double() * 2.0 ** -53


def normals(seed, name, count, device):
    """Standard normals 0 … count - 1 of a parameter's stream, float64."""
    words = philox(seed, (1, 0, 0, 0))  # 1: RandomPurpose::kInit
    key, stream = words[0] | words[1] << 32, xxhash.xxh3_64_intdigest(name.encode())
    for begin in range(0, count, PIECE):
        index = torch.arange(begin, min(begin + PIECE, count), device=device)
        w0, w1, w2, w3 = philox(key, (index & WORD, index >> 32,
                                      torch.full_like(index, stream & WORD),
                                      torch.full_like(index, stream >> 32)))
        yield (-2.0 * torch.log1p(-unit(w0, w1))).sqrt() * torch.cos(2.0 * math.pi * unit(w2, w3))


def initial_values(name, count, model, seed, device="cpu"):
    """All elements of parameter `name`, flat, float32; `model` is the [model] section."""
    if name.endswith(".bias"):
        return torch.zeros(count, device=device)
    if "norm" in name:
        return torch.ones(count, device=device)
    std = model["init_std"]
    if name.endswith((".attention.out.weight", ".mlp.down.weight")):
        std /= math.sqrt(2.0 * model["layers"])
    return torch.cat([(std * piece).float() for piece in normals(seed, name, count, device)])


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    for name, entry in json.loads(raw[8:begin]).items():
        if name != "__metadata__":
            low, high = (begin + offset for offset in entry["data_offsets"])
            yield name, torch.frombuffer(bytearray(raw[low:high]), dtype=torch.float32)


def check(program):
    """One step with learning rate 0 must leave the weights that this file computes, bit for bit."""
    sys.path.insert(0, str(ROOT / "tools"))
    from muster_run import MusterRun
    for config in ("demo", "gpt2-124m"):
        settings = {"run.seed": 7, "run.device": "cpu", "data.sources": [str(ROOT / "README.md")],
                    "data.held_out": 0, "model.layers": 2, "model.width": 64, "model.heads": 2,
                    "model.ffn": 96, "train.steps": 1, "train.global_batch": 1, "train.eval_every": 0,
                    "train.micro_batch": 1, "train.sequence_length": 64, "optimizer.lr": 0,
                    "optimizer.weight_decay": 0, "parallel.workers": 1}
        run = MusterRun(program, ROOT / f"configs/{config}.toml", settings, 1, finish=True)
        folder = next((run.run_dir / "checkpoints").glob("step-*"))
        manifest = json.loads((folder / "manifest.json").read_text())
        weights = {name: data for path in folder.glob("*.safetensors")
                   for name, data in read_safetensors(path)}
        for part in manifest["units"]:
            expected = torch.cat([initial_values(p["name"], math.prod(p["shape"]), manifest["model"], 7)
                                  for p in part["parameters"]])
            if not torch.equal(expected, weights[part["name"] + "/weight"]):
                sys.exit(f"{config}: {part['name']}: the initial weights differ")
        run.close()
        print(f"{config}: {len(manifest['units'])} units, the same bits")


if __name__ == "__main__":
    check(sys.argv[1])
