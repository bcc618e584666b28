#!/usr/bin/env python3
"""Changes the size of a run on two GPUs while it trains, and kills a worker of it; says how long training paused.

    python3 tools/check_elastic_gpu.py --muster build/tools/muster/muster

Llama-3.2-1B's shape from 1 to 2 workers and back, --rounds times, then once more to 2, of which the younger is killed.
Steps are timed by the arrival of their lines in metrics.jsonl: a pause is the longest time between two lines around the
change beyond the median step of the two sizes. Checked: every step is there once, in order, each pause and recovery is
within its bound, and the losses are those of an undisturbed run of two GPUs, within --tolerance (bf16: sums in another
order). The kill waits until a step was mirrored. Exit status 1 when something did not hold.
"""
import argparse
import os
import pathlib
import signal
import statistics
import sys
import tempfile

from muster_run import MusterRun

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAUSE_S, RECOVERY_S = 1.0, 4.0


class Changes:
    """Makes one change after the other, each some steps after the last one has happened."""

    def __init__(self, rounds, steps_between, kill):
        self.plan = ["grow", "shrink"] * rounds + (["grow", "kill"] if kill else [])
        self.steps_between = steps_between
        self.made = []  # [what, second, step]
        self._settled = None  # the first step of the present size

    def __call__(self, run):
        newest = run.metrics[-1]
        if self.made and self.made[-1][0] != "kill" and newest["world"] != (2 if self.made[-1][0] == "grow" else 1):
            return False
        if self._settled is None:
            self._settled = newest["step"]
        if newest["step"] < self._settled + self.steps_between:
            return False
        if len(self.made) == len(self.plan):
            return True
        what = self.plan[len(self.made)]
        if what == "kill" and "mirror_s" not in newest:
            return False
        self.made.append((what, run.now(), newest["step"]))
        self._settled = None
        if what == "kill":
            os.kill(run.pids("worker")[-1], signal.SIGKILL)
        else:
            run.command("scale", "--workers", "2" if what == "grow" else "1")
        return False


def step_times(run):
    return [b - a for a, b in zip(run.arrivals, run.arrivals[1:])]


def pause(run, what, second):
    """Of the change made then: (seconds beyond a step, last step before it, seconds from the order to the next step)."""
    worlds = [line["world"] for line in run.metrics]
    times = step_times(run)
    usual = {world: statistics.median([t for t, w in zip(times, worlds[1:]) if w == world]) for world in set(worlds)}
    first = next(i for i, arrival in enumerate(run.arrivals) if arrival > second)
    if what == "kill":
        # Lines that were under way when it was killed may come after it.
        around = range(first, min(first + 4, len(times)))
    else:
        changed = next(i for i in range(first, len(worlds)) if worlds[i] != worlds[first - 1])
        around = range(max(changed - 2, 0), min(changed + 4, len(times)))
    worst = max(around, key=lambda i: times[i])
    return times[worst] - usual[worlds[worst + 1]], run.metrics[worst]["step"], run.arrivals[worst + 1] - second


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", default=str(ROOT / "build/tools/muster/muster"), help="the program")
    parser.add_argument("--config", default="llama-3.2-1b")
    parser.add_argument("--rounds", type=int, default=2, help="of 1 to 2 workers and back")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--steps-between", type=int, default=12)
    parser.add_argument("--tolerance", type=float, default=2e-3, help="of a loss, relative")
    parser.add_argument("--patience", type=float, default=240)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of muster")
    arguments = parser.parse_args()
    failures = []
    with tempfile.TemporaryDirectory(prefix="elastic-gpu-") as folder:
        text = pathlib.Path(folder) / "random.txt"
        text.write_bytes(os.urandom(32 << 20))
        settings = {"data.sources": [str(text)], "data.held_out": 0, "data.separate_documents": False,
                    "train.steps": 1000000, "train.global_batch": 8, "train.micro_batch": 4,
                    "train.sequence_length": 4096, "train.eval_every": 0, "checkpoint.every": 0,
                    "optimizer.lr": 1e-5, "schedule.type": "constant", "elastic.max_workers": 2,
                    "elastic.mirror_every": 1,
                    **dict(pair.split("=", 1) for pair in arguments.set)}
        config = ROOT / f"configs/{arguments.config}.toml"
        changes = Changes(arguments.rounds, arguments.steps_between, not arguments.no_kill)
        try:
            run = MusterRun(arguments.muster, config, {**settings, "parallel.workers": 1}, 10 ** 9, arguments.patience,
                            on_step=changes)
        except RuntimeError as error:
            print(error)
            return 1
        run.print_events()
        steps = [line["step"] for line in run.metrics]
        if steps != list(range(1, len(steps) + 1)):
            failures.append(f"steps are not 1 to {len(steps)}, once each and in order: {steps}")
        changed = {step + i for _, _, step in changes.made for i in range(8)}
        for line, seconds in zip(run.metrics[1:], step_times(run)):
            if line["step"] in changed:
                print(f"  step {line['step']:4} of {line['world']} workers: {seconds:6.3f} s; computed {line['step_s']:.3f}, "
                      f"waited for data {line['data_wait_s']:.3f}, for others {line['comm_wait_s']:.3f}")
        print(f"\n{'change':8}{'after step':>11}{'pause, s':>10}{'from the order to the next step, s':>36}")
        for what, second, _ in changes.made:
            seconds, step, total = pause(run, what, second)
            print(f"{what:8}{step:11}{seconds:10.3f}{total:36.2f}")
            if what == "kill" and total > RECOVERY_S:
                failures.append(f"training again {total:.2f} s after the kill, not within {RECOVERY_S:g} s")
            if what != "kill" and seconds > PAUSE_S:
                failures.append(f"{what} after step {step}: a pause of {seconds:.2f} s, not within {PAUSE_S:g} s")
        fixed = MusterRun(arguments.muster, config, {**settings, "parallel.workers": 2}, len(steps), arguments.patience)
        fixed.close()
        worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(run.metrics, fixed.metrics))
        print(f"\nloss {run.metrics[0]['loss']:.4f} -> {run.metrics[-1]['loss']:.4f} in {len(steps)} steps; "
              f"{worst:.1e} off an undisturbed run of two at worst")
        if worst > arguments.tolerance:
            failures.append(f"losses differ by {worst:.1e}, not within {arguments.tolerance:g}")
        run.close()
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
