#!/usr/bin/env python3
"""Trains the same work with PyTorch and with `muster train`, one after the other on the same GPUs, and prints tokens/s
per GPU, peak memory and time to the first step, with the ratio and the bars of each work.

    python3 tools/compare_pytorch.py --muster build/tools/muster/muster --out results.jsonl [WORK...]

PyTorch is run as its users run it: torch.compile, scaled_dot_product_attention by cuDNN, bf16 autocast (FSDP2's
mixed precision on several GPUs) with float32 master weights, fused AdamW, clipping, random tokens already on the GPU.
Muster reads random bytes from a file. Every run is a line of --out, and the table is made of all its lines (medians),
so that works and sides can be measured in several calls. Needs torch; nvidia-ml-py for the memory of the device.
"""
import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib

from muster_run import MusterRun

ROOT = pathlib.Path(__file__).resolve().parents[1]
GIB = 2.0 ** 30


@dataclasses.dataclass
class Work:
    config: str                 # configs/CONFIG.toml
    batch: int                  # samples a step and GPU
    length: int                 # tokens a sample
    floor: float                # least tokens/s per GPU, or least ratio over the work `over`
    aim: float
    gpus: int = 1
    checkpoint: str = "none"    # memory.checkpoint
    over: str = ""
    settings: dict = dataclasses.field(default_factory=dict)  # of muster alone
    pytorch: bool = True


WORKS = {
    "llama-3.2-1b": Work("llama-3.2-1b", 4, 4096, 62500, 75000),
    "gpt2-124m": Work("gpt2-124m", 64, 1024, 504000, 600000),
    "llama-3.2-1b-fp8": Work("llama-3.2-1b", 4, 4096, 1.15, 1.3, over="llama-3.2-1b",
                             settings={"precision.matmul": "fp8"}, pytorch=False),
    "llama-3.2-1b-2gpus": Work("llama-3.2-1b", 4, 4096, 0.93, 0.97, gpus=2, over="llama-3.2-1b"),
    "llama-3-8b-2gpus": Work("llama-3-8b", 4, 4096, 8700, 11000, gpus=2, checkpoint="block"),
}


def parse_setting(text):
    key, value = text.split("=", 1)
    try:
        return key, tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key, value


def model_of(work, overrides):
    model = dict(tomllib.loads((ROOT / f"configs/{work.config}.toml").read_text())["model"])
    model |= {key[6:]: value for key, value in overrides.items() if key.startswith("model.")}
    model.setdefault("kv_heads", model["heads"])
    return model


def step_seconds(times, window=4):
    """Median over windows of a few steps: lines of a file are seen in bunches."""
    window = min(window, len(times) - 1)
    return statistics.median((b - a) / window for a, b in zip(times, times[window:]))


# ---- PyTorch's side, in processes of its own -------------------------------------------------------------------------

def pytorch_model(model, length, recompute, compile_blocks):
    """As nanoGPT and torchtitan write them; forward(tokens, targets) gives the loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    gpt2 = model["family"] == "gpt2"
    width, heads, kv_heads = model["width"], model["heads"], model["kv_heads"]
    dim = width // heads

    def norm():
        return nn.LayerNorm(width, eps=1e-5) if gpt2 else nn.RMSNorm(width, eps=1e-5)

    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = norm(), norm()
            self.q = nn.Linear(width, heads * dim, gpt2)
            self.k = nn.Linear(width, kv_heads * dim, gpt2)
            self.v = nn.Linear(width, kv_heads * dim, gpt2)
            self.out = nn.Linear(heads * dim, width, gpt2)
            self.up = nn.Linear(width, model["ffn"], gpt2)
            self.gate = None if gpt2 else nn.Linear(width, model["ffn"], False)
            self.down = nn.Linear(model["ffn"], width, gpt2)

        def forward(self, x, cos, sin):
            y = self.attention_norm(x)
            q, k, v = (part(y).unflatten(-1, (-1, dim)) for part in (self.q, self.k, self.v))
            if not gpt2:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                               is_causal=True, enable_gqa=heads != kv_heads)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            y = self.mlp_norm(x)
            if gpt2:
                return x + self.down(F.gelu(self.up(y), approximate="tanh"))
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def loss_of(x, matrix, targets):
        return F.cross_entropy(F.linear(x, matrix).float().flatten(0, 1), targets.flatten())

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(model["vocab_size"], width)
            self.positions = nn.Embedding(length, width) if gpt2 else None
            self.blocks = nn.ModuleList(Block() for _ in range(model["layers"]))
            self.norm = norm()
            self.head = nn.Linear(width, model["vocab_size"], False)
            if model["tie_embeddings"]:
                self.head.weight = self.tokens.weight
            self.loss = torch.compile(loss_of) if compile_blocks else loss_of
            if compile_blocks:
                for block in self.blocks:
                    block.compile()

        def forward(self, tokens, targets):
            x, cos, sin = self.tokens(tokens), None, None
            if gpt2:
                x = x + self.positions.weight
            else:
                steps = torch.arange(0, dim, 2, device=x.device).float() / dim
                angles = torch.arange(length, device=x.device).float()[:, None] / model["rope_theta"] ** steps
                cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
            for block in self.blocks:
                x = checkpoint(block, x, cos, sin, use_reentrant=False) if recompute else block(x, cos, sin)
            return self.loss(self.norm(x), self.head.weight, targets)

    with torch.device("meta"):
        return Transformer()


def pytorch_process(arguments, work, overrides):
    """One rank; rank 0 prints a JSON line. MASTER_ADDR and the like are set, and so is STARTED_AT."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    sharded = world > 1
    model = model_of(work, overrides)
    net = pytorch_model(model, work.length, work.checkpoint == "block",
                        sharded or arguments.compile == "block")
    if sharded:
        torch.distributed.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(minutes=2))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                      cast_forward_inputs=False)
        mesh = torch.distributed.init_device_mesh(device.type, (world,))
        for block in net.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
    net.to_empty(device=device)
    if model["tie_embeddings"]:
        net.head.weight = net.tokens.weight  # to_empty() has parted them
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    forward = net if sharded or arguments.compile == "block" else torch.compile(net)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, targets = torch.randint(256, (2, work.batch, work.length), device=device)

    def step():
        with contextlib.nullcontext() if sharded else torch.autocast(device.type, torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    def now():
        if not gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(begin, end):
        return begin.elapsed_time(end) / 1e3 if gpu else end - begin

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if gpu else contextlib.nullcontext():
        step()
        if gpu:
            torch.cuda.synchronize()
        first = time.time() - float(os.environ["STARTED_AT"])
        times = []
        for _ in range(arguments.warmup + arguments.steps + 1):
            times.append(now())
            loss = step()
        times.append(now())
    if gpu:
        torch.cuda.synchronize()
    step_s = step_seconds([seconds(times[0], t) for t in times[arguments.warmup:]])
    peak = torch.cuda.max_memory_allocated() / GIB if gpu else 0.0
    if sharded:
        torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps({"step_s": step_s, "first_step_s": first, "peak_gib": peak, "loss": loss.item(),
                          "parameters": sum(p.numel() for p in net.parameters()),
                          "version": "PyTorch " + torch.__version__}))


def run_pytorch(arguments, name, work):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--pytorch-process", name, "--warmup", str(arguments.warmup), "--steps",
               str(arguments.steps), "--compile", arguments.compile, "--batch", str(work.batch), "--length",
               str(work.length)] + [f"--set={setting}" for setting in arguments.set]
    ranks = []
    try:
        for rank in range(work.gpus):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(work.gpus),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "STARTED_AT": str(time.time()),
                           "NCCL_NVLS_ENABLE": "0"}
            ranks.append(subprocess.Popen(command, env=environment, text=True,
                                          stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL))
        output = ranks[0].communicate(timeout=arguments.patience)[0]
        if any(process.wait(60) != 0 for process in ranks):
            raise RuntimeError("PyTorch failed, see above")
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    return json.loads(output.strip().splitlines()[-1])


# ---- Muster's side ---------------------------------------------------------------------------------------------------

def run_muster(arguments, work, overrides, folder):
    corpus = folder / "random.txt"
    tokens = work.batch * work.length * work.gpus
    if not corpus.exists() or corpus.stat().st_size < 2 * tokens:
        corpus.write_bytes(os.urandom(max(16 << 20, 2 * tokens)))
    settings = {"data.sources": [str(corpus)], "data.held_out": 0, "data.separate_documents": False,
                "train.steps": 1000000, "train.global_batch": work.batch * work.gpus,
                "train.micro_batch": work.batch, "train.sequence_length": work.length, "train.eval_every": 0,
                "memory.checkpoint": work.checkpoint, "checkpoint.every": 0, "parallel.workers": work.gpus,
                "run.deterministic": False, **work.settings, **overrides}
    steps = 1 + arguments.warmup + arguments.steps + 1
    run = MusterRun(arguments.muster, ROOT / f"configs/{work.config}.toml", settings, steps, arguments.patience)
    run.close()
    return {"step_s": step_seconds(run.arrivals[1 + arguments.warmup:]), "first_step_s": run.arrivals[0],
            "peak_gib": max(line["mem_bytes"] for line in run.metrics) / GIB, "loss": run.metrics[-1]["loss"],
            "data_wait_s": run.metrics[-1]["data_wait_s"], "comm_wait_s": run.metrics[-1]["comm_wait_s"],
            "version": subprocess.check_output([arguments.muster, "--version"], text=True).strip()}


# ---- Both ------------------------------------------------------------------------------------------------------------

class DeviceMemory:
    """The most memory in use on any GPU while the block runs, beyond what was in use before it."""

    def __enter__(self):
        self.gib, self._done, self._thread, self.name = 0.0, threading.Event(), None, "CPU"
        try:
            import pynvml
            pynvml.nvmlInit()
        except Exception:  # no package, or no driver
            return self
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        indices = map(int, visible.split(",")) if visible else range(pynvml.nvmlDeviceGetCount())
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in indices]
        self.name = str(pynvml.nvmlDeviceGetName(gpus[0]))
        before = [pynvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in gpus]

        def watch():
            while not self._done.wait(0.02):
                used = (pynvml.nvmlDeviceGetMemoryInfo(gpu).used - rest for gpu, rest in zip(gpus, before))
                self.gib = max(self.gib, max(used) / GIB)

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        if self._thread:
            self._thread.join()


def measure(arguments, name, work, who, overrides, folder):
    with DeviceMemory() as memory:
        if who == "pytorch":
            result = run_pytorch(arguments, name, work)
        else:
            result = run_muster(arguments, work, overrides, folder)
    tokens = work.batch * work.length
    result = {"work": name, "who": who, "tokens_per_s": tokens / result["step_s"], "device_gib": memory.gib,
              "gpu": memory.name, "gpus": work.gpus, "batch": work.batch, "length": work.length, **result}
    print(json.dumps(result), flush=True)
    with open(arguments.out, "a") as out:
        out.write(json.dumps(result) + "\n")


def table(path):
    runs = [json.loads(line) for line in open(path)] if os.path.exists(path) else []

    def median(work, who, key):
        values = [run[key] for run in runs if run["work"] == work and run["who"] == who]
        return statistics.median(values) if values else math.nan

    def pair(work, key, digits):
        return " / ".join(f"{median(work, who, key):,.{digits}f}" for who in ("muster", "pytorch"))

    print("\n| work, batch × T a GPU | Muster, tokens/s a GPU | PyTorch | ratio | floor / aim | peak GiB,"
          " Muster / PyTorch | of the device | first step, s |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, work in WORKS.items():
        ours, theirs = median(name, "muster", "tokens_per_s"), median(name, "pytorch", "tokens_per_s")
        if math.isnan(ours) and math.isnan(theirs):
            continue
        bars, reached = f"{work.floor:,g} / {work.aim:,g}", ours
        if work.over:
            reached = ours / median(work.over, "muster", "tokens_per_s")
            bars = f"{reached:.3f} × {work.over}: {bars}"
        verdict = ("not measured" if math.isnan(reached) else "aim" if reached >= work.aim else
                   "floor" if reached >= work.floor else "below")
        row = (f"| {name}, {work.batch} × {work.length} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f}"
               f" | {bars} ({verdict}) | {pair(name, 'peak_gib', 1)} | {pair(name, 'device_gib', 1)}"
               f" | {pair(name, 'first_step_s', 1)} |")
        print(row.replace("nan", "–"))
    print(f"\n{', '.join(sorted({run['gpu'] for run in runs}))}; {', '.join(sorted({run['version'] for run in runs}))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"all by default: {', '.join(WORKS)}")
    parser.add_argument("--muster", default=str(ROOT / "build/tools/muster/muster"), help="the program")
    parser.add_argument("--out", default="compare_pytorch.jsonl", help="one JSON object a run is appended here")
    parser.add_argument("--skip-pytorch", action="store_true")
    parser.add_argument("--pytorch-only", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    parser.add_argument("--rounds", type=int, default=1, help="how often both are run, alternately")
    parser.add_argument("--steps", type=int, default=20, help="steps measured")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them, after the first")
    parser.add_argument("--compile", choices=["model", "block"], default="model",
                        help="what torch.compile gets on one GPU; block compiles sooner (always so with FSDP2)")
    parser.add_argument("--patience", type=float, default=400, help="seconds until a run is given up")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="further settings of muster; those of [model] change PyTorch's model too")
    parser.add_argument("--batch", type=int, help="instead of the works' own")
    parser.add_argument("--length", type=int, help="instead of the works' own")
    parser.add_argument("--pytorch-process", metavar="WORK", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    overrides = dict(parse_setting(setting) for setting in arguments.set)
    for work in WORKS.values():
        work.batch, work.length = arguments.batch or work.batch, arguments.length or work.length
    if arguments.pytorch_process:
        return pytorch_process(arguments, WORKS[arguments.pytorch_process], overrides)
    if unknown := set(arguments.works) - set(WORKS):
        parser.error(f"unknown work {', '.join(unknown)}; there are {', '.join(WORKS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        for name in [] if arguments.table else arguments.works or WORKS:
            work = WORKS[name]
            sides = [] if arguments.skip_pytorch or not work.pytorch else ["pytorch"]
            sides += [] if arguments.pytorch_only else ["muster"]
            for who in sides * arguments.rounds:
                try:
                    measure(arguments, name, work, who, overrides, pathlib.Path(folder))
                except (RuntimeError, subprocess.SubprocessError) as error:
                    failed = True
                    print(f"{name}, {who}: {error}", file=sys.stderr, flush=True)
    table(arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
