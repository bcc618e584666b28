"""Runs `muster train` twice where the same losses are due, and compares them step by step:

    python3 tests/golden/gpu_agreement.py --muster build/tools/muster/muster gpus    one GPU against two, bf16
    python3 tests/golden/gpu_agreement.py --muster build/tools/muster/muster cpu     CPU against GPU, float32

gpus: in float32, four layers of Llama-3.2-1B's shape: every loss within 1e-5, relative. In bf16, the whole shape; the
bound is measured, not guessed: one GPU trains a second time, and a third time with half the micro-batch (the same samples,
gradients summed in other orders), and two GPUs may differ from one by no more than --factor times what these differ by,
in the largest difference of a loss over all steps. The learning rate is low, since training magnifies any difference.
cpu: tiny Llama and GPT-2; every loss within 1e-4, relative.
Exit status 1 when a bound is broken. Needs numpy only.
"""
import argparse
import math
import pathlib
import sys
import tempfile

from golden_text import write_text

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from muster_run import MusterRun  # noqa: E402


def losses(arguments, config, text, settings):
    settings = {"data.sources": [str(text)], "data.held_out": 0, "data.separate_documents": False,
                "train.eval_every": 0, "train.steps": 4 * arguments.steps, **settings,
                **dict(pair.split("=", 1) for pair in arguments.set)}
    run = MusterRun(arguments.muster, ROOT / f"configs/{config}.toml", settings, arguments.steps)
    run.close()
    return [line["loss"] for line in run.metrics[:arguments.steps]]


def apart(a, b):
    differences = [math.inf if math.isnan(x - y) else abs(x - y) for x, y in zip(a, b)]
    return max(differences), differences


def show(name, values):
    print(f"{name:34}", " ".join(f"{value:.1e}" for value in values))


def compare_gpus(arguments, folder):
    text = write_text(folder / "text.txt", 4 << 20)
    same = {"train.sequence_length": 2048, "train.global_batch": 8, "train.micro_batch": 4,
            "schedule.warmup_steps": 20, "run.device": arguments.device}

    def train(**settings):
        given = {key.replace("__", "."): value for key, value in settings.items()}
        return losses(arguments, "llama-3.2-1b", text, {**same, **given})

    exact = {"precision__compute": "float32", "model__layers": 4, "train__sequence_length": 1024}
    one, two = (train(**exact, parallel__workers=workers) for workers in (1, 2))
    exactly = max(d / loss for d, loss in zip(apart(one, two)[1], one))
    print(f"float32: loss {one[0]:.4f} -> {one[-1]:.4f}; one GPU and two {exactly:.1e} apart at worst, relative; bound 1e-5")

    low = {"optimizer__lr": 1e-5}
    one = train(**low, parallel__workers=1)
    again = train(**low, parallel__workers=1)
    half = train(**low, parallel__workers=1, train__micro_batch=2)
    two = train(**low, parallel__workers=2)
    print(f"bf16: loss {one[0]:.4f} -> {one[-1]:.4f}; apart, step by step:")
    show("one GPU, twice", apart(one, again)[1])
    show("one GPU, micro-batch 4 and 2", apart(one, half)[1])
    show("one GPU and two, micro-batch 4", apart(one, two)[1])
    noise = max(apart(one, again)[0], apart(one, half)[0], apart(again, half)[0])
    worst = apart(one, two)[0]
    print(f"worst: {worst:.2e}, bound {arguments.factor:g} × {noise:.2e}")
    return exactly <= 1e-5 and worst <= arguments.factor * noise


def compare_cpu(arguments, folder):
    text = write_text(folder / "text.txt", 1 << 20)
    tiny = {"model.vocab_size": 257, "model.width": 128, "model.layers": 3, "model.heads": 2, "model.ffn": 320,
            "train.sequence_length": 128, "train.global_batch": 8, "train.micro_batch": 4, "optimizer.lr": 3e-3,
            "schedule.warmup_steps": 10, "parallel.workers": 1, "precision.compute": "float32"}
    agree = True
    for config in ("llama-3.2-1b", "gpt2-124m"):
        settings = {**tiny, "model.kv_heads": 1} if config.startswith("llama") else tiny
        cpu = losses(arguments, config, text, {**settings, "run.device": "cpu"})
        gpu = losses(arguments, config, text, {**settings, "run.device": arguments.device})
        worst = max(d / c for d, c in zip(apart(cpu, gpu)[1], cpu))
        print(f"{config}'s family, tiny: loss {cpu[0]:.4f} -> {cpu[-1]:.4f}; CPU and GPU {worst:.1e} apart at worst")
        agree &= worst <= 1e-4
    return agree


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gpus", "cpu"])
    parser.add_argument("--muster", default=str(ROOT / "build/tools/muster/muster"), help="the program")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--factor", type=float, default=2.0, help="of the measured noise (gpus)")
    parser.add_argument("--device", default="cuda", help="in place of the GPU, to try this script")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of muster")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        agree = {"gpus": compare_gpus, "cpu": compare_cpu}[arguments.what](arguments, pathlib.Path(folder))
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
