"""Trains the same model from the same weights on the same tokens with `muster train` and with PyTorch, and compares
loss and gradient norm of every step. On a machine with a GPU:

    python3 tests/golden/gpu_golden.py --muster build/tools/muster/muster llama-3.2-1b gpt2-124m

Without one, `--device cpu tiny-llama tiny-gpt2` does the same in float32 at a tiny shape. Needs torch and xxhash.

PyTorch's bf16 here is float32 master weights and autocast with the residual stream and the norms' gains in bf16 too,
which is what FSDP2's mixed precision gives and what Muster keeps. Plain autocast keeps both in float32; that difference is
systematic and far larger than the noise of summation orders (gains near 1 only change in steps of 2^-8), so --scale shows
it beside the comparison, and float32 throughout as well.
Exit status 1 when a step's loss differs by more than --loss, or its gradient norm by more than --norm of it.
"""
import argparse
import contextlib
import json
import math
import pathlib
import sys
import tomllib

import numpy
import torch
import torch.nn.utils.parametrize
import xxhash
from torch.nn import functional as F

import make_golden as golden
from golden_text import write_text
from muster_init import ROOT, initial_values

sys.path.insert(0, str(ROOT / "tools"))
from muster_run import MusterRun  # noqa: E402

TINY = {"model.vocab_size": 257, "model.width": 64, "model.layers": 3, "model.heads": 4, "model.ffn": 160,
        "train.sequence_length": 64, "train.global_batch": 4, "train.micro_batch": 2, "optimizer.lr": 3e-3,
        "schedule.warmup_steps": 10}
# name: config, settings
WORKS = {
    "llama-3.2-1b": ("llama-3.2-1b", {"train.sequence_length": 1024, "train.global_batch": 4,
                                      "train.micro_batch": 4, "schedule.warmup_steps": 50,
                                      "optimizer.lr": 1e-6}),
    "gpt2-124m": ("gpt2-124m", {"train.sequence_length": 1024, "train.global_batch": 8, "train.micro_batch": 8,
                                "schedule.warmup_steps": 50, "optimizer.lr": 3e-5}),
    "tiny-llama": ("llama-3.2-1b", {**TINY, "model.kv_heads": 2}),
    "tiny-gpt2": ("gpt2-124m", TINY),
}


class Attention(golden.Attention):
    """make_golden's, over whole samples and by PyTorch's fused attention."""

    def forward(self, x, batch):
        model, shape = self.model, (*batch["shape"], -1, self.model["head_dim"])
        q, k, v = (project(x).view(x.shape[0], -1, shape[-1]) for project in (self.q, self.k, self.v))
        if model["family"] == "llama":
            q, k = golden.rotate(q, batch["angles"]), golden.rotate(k, batch["angles"])
        groups = model["heads"] // model["kv_heads"]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(x.shape[0], -1))


def build(config, device):
    """The model with Muster's initial weights."""
    model = config["model"]
    golden.Attention = Attention
    with torch.device("meta"):
        net = golden.Transformer(model)
    net.to_empty(device=device)
    if model["tie_embeddings"]:
        net.head.weight = net.tokens.weight
    with torch.no_grad():
        for name, parts in golden.muster_parameters(net, model).items():
            count = sum(part.numel() for part in parts)
            values = initial_values(name, count, model, config["run"]["seed"], device)
            for part, piece in zip(parts, values.split([part.numel() for part in parts])):
                part.copy_(piece.view_as(part))
    return net


class ThroughBf16(torch.nn.Module):
    def forward(self, weight):
        return weight.bfloat16().float()


def round_norms(net):
    """Norms use their parameters in bf16, and their gradients are."""
    for module in list(net.modules()):
        if isinstance(module, (torch.nn.LayerNorm, golden.RMSNorm)):
            for name in [name for name, _ in module.named_parameters(recurse=False)]:
                torch.nn.utils.parametrize.register_parametrization(module, name, ThroughBf16())


def sample_hashes(samples, length, text):
    tokens = numpy.frombuffer(text, numpy.uint8).astype(numpy.int32)
    return [xxhash.xxh3_64_hexdigest(tokens[i * length:(i + 1) * length].tobytes()) for i in samples]


def train_pytorch(config, text, steps, device, precision, parts=1):
    """[(loss, gradient norm)] of steps 1, 2, …; step s has the samples (s - 1)·B … s·B - 1 of the text, in `parts`
    passes. `precision`: float32, autocast, or bfloat16 (autocast with the residual stream and the norms in bf16)."""
    model, train = config["model"], config["train"]
    batch_size, length = train["global_batch"] // parts, train["sequence_length"]
    net = build(config, device)
    if precision == "bfloat16":
        net.tokens.register_forward_hook(lambda layer, inputs, out: out.bfloat16())
        if net.positions is not None:
            net.positions.register_forward_hook(lambda layer, inputs, out: out.bfloat16())
        round_norms(net)
    adamw = golden.make_adamw(net, config["optimizer"])
    positions = torch.arange(length, device=device).repeat(batch_size)
    batch = {"shape": (batch_size, length), "positions": positions}
    if model["family"] == "llama":
        batch["angles"] = golden.rope_angles(model, positions.cpu()).float().to(device)
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    history = []
    for step in range(1, steps + 1):
        for group in adamw.param_groups:
            group["lr"] = golden.learning_rate(step, train["steps"], config["optimizer"], config["schedule"])
        adamw.zero_grad()
        loss = 0.0
        for part in range((step - 1) * parts, step * parts):
            begin = part * batch_size * length
            end = begin + batch_size * length
            batch |= {"tokens": stream[begin:end], "targets": stream[begin + 1:end + 1]}
            with torch.autocast(device, torch.bfloat16) if precision != "float32" else contextlib.nullcontext():
                of_part = net(batch) / parts
            of_part.backward()
            loss += of_part.item()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), config["optimizer"]["clip_norm"])
        adamw.step()
        history.append((loss, norm.item()))
    return history


def settings_of(arguments, name):
    """Of the work, and those of --set over them."""
    given = (pair.split("=", 1) for pair in arguments.set)
    return {**WORKS[name][1], **{key: int(value) if value.isdigit() else value for key, value in given}}


def train_muster(arguments, name, text_path):
    """([(loss, gradient norm)], the resolved config, the lines of samples.jsonl)"""
    config, settings = WORKS[name][0], settings_of(arguments, name)
    settings = {"run.device": arguments.device, "precision.compute": arguments.precision,
                "data.sources": [str(text_path)], "data.held_out": 0, "data.shuffle": False,
                "data.separate_documents": False, "train.eval_every": 0, "metrics.debug_samples": True,
                "parallel.workers": 1, "train.steps": 4 * arguments.steps, **settings}
    run = MusterRun(arguments.muster, ROOT / f"configs/{config}.toml", settings, arguments.steps)
    resolved = tomllib.loads(run.config.read_text())
    run.close()
    model = resolved["model"]
    model["kv_heads"] = model["kv_heads"] or model["heads"]
    model["head_dim"] = model["head_dim"] or model["width"] // model["heads"]
    model["max_positions"] = model["max_positions"] or resolved["train"]["sequence_length"]
    metrics = run.metrics[:arguments.steps]
    return [(line["loss"], line["grad_norm"]) for line in metrics], resolved, run.samples[:arguments.steps]


def worst(ours, theirs):
    """Largest difference of loss and of gradient norm, the latter relative, with their steps."""
    losses = [abs(a[0] - b[0]) for a, b in zip(ours, theirs)]
    norms = [abs(a[1] - b[1]) / b[1] for a, b in zip(ours, theirs)]
    # A NaN is the worst of all, which max() does not know.
    losses, norms = ([math.inf if math.isnan(v) else v for v in values] for values in (losses, norms))
    return max(losses), losses.index(max(losses)) + 1, max(norms), norms.index(max(norms)) + 1


def describe(ours, theirs):
    loss, loss_step, norm, norm_step = worst(ours, theirs)
    return f"loss {loss:.2e} apart at worst (step {loss_step}), gradient norm {norm:.3%} (step {norm_step})"


def compare(arguments, name):
    text_path = pathlib.Path(arguments.folder) / f"{name}.txt"
    settings = settings_of(arguments, name)
    samples = settings["train.global_batch"] * arguments.steps
    length = settings["train.sequence_length"]
    write_text(text_path, (samples + 1) * length)
    text = text_path.read_bytes()
    ours, config, lines = train_muster(arguments, name, text_path)
    for step, line in enumerate(lines):
        expected = list(range(step * settings["train.global_batch"], (step + 1) * settings["train.global_batch"]))
        assert line["samples"] == expected, f"step {step + 1} has samples {line['samples']}"
        assert line["hashes"] == sample_hashes(expected, length, text), f"step {step + 1}: other tokens"
    precisions = {"PyTorch": (arguments.precision, 1)}
    if arguments.noise:
        precisions |= {"PyTorch in two passes a step": (arguments.precision, 2)}
    if arguments.scale:
        precisions |= {"PyTorch's plain autocast": ("autocast", 1), "PyTorch in float32": ("float32", 1)}
    references = {who: train_pytorch(config, text, arguments.steps, arguments.device, *how)
                  for who, how in precisions.items()}
    theirs = references["PyTorch"]
    if arguments.verbose:
        for step, (a, b) in enumerate(zip(ours, theirs), 1):
            print(f"  step {step:3}  loss {a[0]:.5f} {b[0]:.5f} {a[0] - b[0]:+.5f}  norm {a[1]:.4f} {b[1]:.4f}")
    print(f"{name}, {arguments.steps} steps, {arguments.precision}: loss {ours[0][0]:.4f} -> {ours[-1][0]:.4f}")
    for who, reference in references.items():
        print(f"  muster and {who}: {describe(ours, reference)}")
        if reference is not theirs:
            print(f"  for scale, PyTorch and {who}: {describe(theirs, reference)}")
    loss, _, norm, _ = worst(ours, theirs)
    with open(pathlib.Path(arguments.folder) / f"{name}.json", "w") as file:
        json.dump({"muster": ours, **references}, file)
    return loss <= arguments.loss and norm <= arguments.norm and len(ours) == arguments.steps


def main():
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", choices=list(WORKS))
    parser.add_argument("--muster", default=str(ROOT / "build/tools/muster/muster"), help="the program")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--loss", type=float, help="largest difference of a loss (2e-3; float32: 1e-4)")
    parser.add_argument("--norm", type=float, default=0.01, help="largest relative difference of a norm")
    parser.add_argument("--noise", action="store_true", help="also PyTorch with the sums of a step in another order")
    parser.add_argument("--scale", action="store_true", help="also PyTorch's plain autocast and float32")
    parser.add_argument("--folder", default="/tmp", help="where the text and the histories are left")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of muster")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    arguments = parser.parse_args()
    arguments.precision = arguments.precision or ("bfloat16" if arguments.device == "cuda" else "float32")
    arguments.loss = arguments.loss or (2e-3 if arguments.precision == "bfloat16" else 1e-4)
    agree = [compare(arguments, name) for name in arguments.works]
    sys.exit(0 if all(agree) else 1)


if __name__ == "__main__":
    main()
