#!/usr/bin/env python3
"""Lets everything happen to one run that can happen to it, for half an hour, and checks that it does not show: that
training goes on each time within a bound, that no sample is lost or counted twice, and that the losses are those of a
run that was left alone.

    python3 tools/chaos.py [--muster build/tools/muster/muster] [--minutes 30] [--seed N] [--keep DIR]

The run is one `muster coordinator` and some `muster node`s on this machine's CPU. As root, where the kernel has network
namespaces, each node has its own, and links are cut, parted and slowed down as well. Every event is printed as it
happens, then a summary. Exits with 1 when something did not hold; the folder is kept then.
"""
import argparse
import collections
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from chaos_network import Network

ROOT = pathlib.Path(__file__).resolve().parents[1]
TAG = "MUSTER_CHAOS_RUN"
MOST_WORKERS = 6
HEARTBEAT_S = 0.5
COLLECTIVE_TIMEOUT_S = 15.0
COORDINATOR_TIMEOUT_S = 20.0

CONFIG = """
[run]
name = "chaos"
device = "cpu"
[model]
width = 96
layers = 4
heads = 4
kv_heads = 2
ffn = 256
[data]
sources = ["corpus"]
cache_dir = "cache"
held_out = 0.1
[train]
steps = 10000000
global_batch = 12
micro_batch = 2
sequence_length = 128
eval_samples = 8
[optimizer]
lr = 1e-5
[schedule]
type = "constant"
warmup_steps = 10
[checkpoint]
every = 20
[metrics]
debug_samples = true
"""

# Relative, of any step's loss. Training magnifies the order of sums, the more the higher the learning rate and the more
# steps there are: hence the low one above.
TOLERANCE = 1e-5

ELASTIC = {"heartbeat_s": HEARTBEAT_S, "join_window_s": 0.1, "restarts": 1000000, "mirror_every": 1,
           "max_workers": MOST_WORKERS, "collective_timeout_s": COLLECTIVE_TIMEOUT_S,
           "coordinator_timeout_s": COORDINATOR_TIMEOUT_S}


class Stuck(Exception):
    """Something did not hold."""


def write_corpus(folder):
    words = "the kernel driver reads a page and writes memory to disk when lock is held since nobody waits".split()
    dice = random.Random(7)
    folder.mkdir(parents=True)
    for i in range(24):
        text = " ".join(dice.choice(words) + ("\n" if dice.random() < 0.1 else "") for _ in range(400 + 60 * i))
        (folder / f"doc{i:02}.txt").write_text(text)


def lines_of(path):
    """The whole lines of a .jsonl file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


class Node:
    def __init__(self, process, workers, link):
        self.process, self.workers, self.link = process, workers, link


class Watch:
    """What events.jsonl has told so far of what was done to the run."""

    def __init__(self, path):
        self._path, self._read = path, 0
        self.unnoticed = set()  # processes that were killed, and no event tells of it yet
        self.coordinators = 1  # started
        self._restored, self._changing = 0, False

    def is_settled(self):
        """All is noticed, and no change of generation is under way."""
        with open(self._path, "rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + (1 if whole else 0)
        for event in map(json.loads, whole.splitlines()):
            kind, reason = event["kind"], event["reason"]
            if kind.endswith("_lost") or kind == "member_left":
                self.unnoticed = {pid for pid in self.unnoticed if f"pid {pid} " not in reason}
            self._restored += kind == "restored"
            if kind in ("halt", "restored", "waiting", "generation"):
                self._changing = True
            elif kind == "generation_started":
                self._changing = False
        return not self.unnoticed and self._restored + 1 == self.coordinators and not self._changing


class Cluster:
    """The processes of the run, and where it is."""

    def __init__(self, program, folder, network):
        self.program, self.folder, self.network = str(program), folder, network
        self.run_dir = folder / "run"
        self.watch = Watch(self.run_dir / "events.jsonl")
        self.nodes = []
        self._tag = f"{os.getpid()}-{time.time_ns()}"
        self._log = open(folder / "output", "ab")
        self.endpoint = f"tcp://{'127.0.0.1' if network.trouble else network.host}:0"
        self.start_coordinator()
        self.until(lambda: (self.run_dir / "coordinator.endpoint").exists(), 30, "the coordinator does not listen")
        self.endpoint = (self.run_dir / "coordinator.endpoint").read_text().strip()

    def _spawn(self, arguments, link=None):
        words = ["ip", "netns", "exec", link] if link else []
        return subprocess.Popen([*words, self.program, *arguments], stdout=self._log, stderr=self._log,
                                start_new_session=True, cwd=self.folder, env={**os.environ, TAG: self._tag, "OMP_WAIT_POLICY": "passive"})

    def start_coordinator(self):
        settings = {"run.dir": self.run_dir, "parallel.workers": 4, **{f"elastic.{k}": v for k, v in ELASTIC.items()}}
        arguments = ["coordinator", str(self.folder / "chaos.toml"), "--listen", self.endpoint]
        for key, value in settings.items():
            arguments += ["--set", f"{key}={value}"]
        self.coordinator = self._spawn(arguments)

    def key(self):
        key = self.run_dir / "run.key"
        return ["--run-key", str(key)] if key.exists() else []

    def add_node(self, workers):
        link = None if self.network.trouble else self.network.add_link()
        process = self._spawn(["node", "--coordinator", self.endpoint, "--workers", str(workers), *self.key()], link)
        self.nodes.append(Node(process, workers, link))

    def forget(self, node):
        """Ends what is left of a node."""
        if node.process.poll() is None:
            node.process.kill()
        node.process.wait(10)
        self.nodes.remove(node)
        if node.link:
            self.network.remove_link(node.link)

    def processes(self):
        """{pid: (command, parent)} of all that lives."""
        found, wanted = {}, f"{TAG}={self._tag}".encode()
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue  # it has ended meanwhile
            if state != "Z" and len(words) > 2:
                found[int(entry.name)] = (words[1].decode(), int(parent))
        return found

    def pids(self, command, node=None):
        return [pid for pid, (name, parent) in self.processes().items()
                if name == command and (node is None or parent == node.process.pid)]

    def newest(self):
        """The last line of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return {"step": 0, "world": 0}
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4000))
            whole = file.read().split(b"\n")[:-1]
        return json.loads(whole[-1]) if whole else {"step": 0, "world": 0}

    def until(self, condition, patience_s, what):
        """Seconds until it holds; raises Stuck."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > patience_s:
                raise Stuck(f"{what} within {patience_s:.0f} s; step {self.newest()['step']}")
            if self.coordinator.poll() is not None:
                raise Stuck(f"the coordinator ended with {self.coordinator.returncode}: {self.last_event()}")
            time.sleep(0.01)
        return time.monotonic() - start

    def last_event(self):
        events = self.events()
        return events[-1]["reason"] if events else "it never began"

    def events(self):
        return lines_of(self.run_dir / "events.jsonl")

    def command(self, *arguments):
        """Runs `muster ARGUMENTS RUN`; its output, or None when it was refused."""
        done = subprocess.run([self.program, arguments[0], str(self.run_dir), *arguments[1:]], capture_output=True,
                              text=True, timeout=30)
        if done.returncode != 0:
            print(f"    muster {' '.join(arguments)}: {done.stderr.strip()}", flush=True)
        return done.stdout if done.returncode == 0 else None

    def close(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._log.close()


class Chaos:
    """The events. Each method does one and returns (what was done, whether a worker may have been lost along with its
    mirror), or None where it cannot be done now."""

    # Shares of all events, and bounds in seconds until three more steps are there, from when the event was over. What only silence shows takes
    # five heartbeats, a process that was killed often is started anew after 5 s, and a link that is back is used once
    # TCP tries again.
    KINDS = {"worker_killed": (4, 8), "data_killed": (2, 12), "coordinator_killed": (2, 12), "node_killed": (2, 12),
             "two_killed": (1, 12), "all_workers_killed": (0.3, 20), "worker_and_coordinator_killed": (1, 15),
             "worker_stopped": (2, 12), "coordinator_stopped": (1, 12), "node_left": (2, 12), "node_joined": (1, 8),
             "scaled": (3, 12), "drained": (2, 8)}
    NETWORK_KINDS = {"link_cut_shortly": (2, 15), "link_cut": (1.5, 20), "nodes_parted": (1.5, 30), "link_slow": (1.5, 30)}

    def __init__(self, cluster, dice):
        self.cluster, self.dice = cluster, dice
        self.kinds = dict(self.KINDS)
        if not cluster.network.trouble:
            self.kinds.update(self.NETWORK_KINDS)
            if not cluster.network.slowness:
                del self.kinds["link_slow"]

    def next_kind(self):
        return self.dice.choices(list(self.kinds), [weight for weight, _ in self.kinds.values()])[0]

    def bound_s(self, kind):
        return self.kinds[kind][1]

    def _any(self, command):
        pids = self.cluster.pids(command)
        return self.dice.choice(pids) if pids else None

    def _kill(self, pid, number=signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return  # it was ended by its agent
        if number == signal.SIGKILL:
            self.cluster.watch.unnoticed.add(pid)

    def _wait(self, least, most):
        length = self.dice.uniform(least, most)
        time.sleep(length)
        return length

    def _spare_node(self):
        """A node without which somebody still trains."""
        node = self.dice.choice(self.cluster.nodes)
        return node if len(self.cluster.pids("worker", node)) < self.cluster.newest()["world"] else None

    def _new_node(self):
        workers = self.dice.randint(1, 2)
        self.cluster.add_node(workers)
        return f"another node with {workers}"

    def worker_killed(self):
        pid = self._any("worker")
        if pid is None:
            return None
        self._kill(pid)
        return f"{pid}", False

    def two_killed(self):
        pids = self.cluster.pids("worker")
        if len(pids) < 3:
            return None
        victims = self.dice.sample(pids, 2)
        for pid in victims:
            self._kill(pid)
        return f"{victims}", True

    def all_workers_killed(self):
        pids = self.cluster.pids("worker")
        for pid in pids:
            self._kill(pid)
        return f"{pids}", True

    def data_killed(self):
        pid = self._any("data")
        if pid is None:
            return None
        self._kill(pid)
        return f"{pid}", False

    def _replace_coordinator(self):
        self.cluster.coordinator.kill()
        self.cluster.coordinator.wait(10)
        away = self._wait(0.0, 3.0)
        self.cluster.start_coordinator()
        self.cluster.watch.coordinators += 1
        return f"away for {away:.1f} s"

    def coordinator_killed(self):
        return self._replace_coordinator(), False

    def worker_and_coordinator_killed(self):
        pid = self._any("worker")
        if pid is None:
            return None
        self._kill(pid)
        between = self._wait(0.0, 0.5)
        return f"{pid}, after {between:.2f} s the coordinator, {self._replace_coordinator()}", False

    def coordinator_stopped(self):
        self.cluster.coordinator.send_signal(signal.SIGSTOP)
        length = self._wait(0.2, 4.0)
        self.cluster.coordinator.send_signal(signal.SIGCONT)
        return f"for {length:.1f} s", False

    def worker_stopped(self):
        pid = self._any("worker")
        if pid is None:
            return None
        self._kill(pid, signal.SIGSTOP)
        length = self._wait(0.2, 5.0)
        self._kill(pid, signal.SIGCONT)
        return f"{pid} for {length:.1f} s", False

    def node_killed(self):
        node = self._spare_node()
        if node is None:
            return None
        workers = len(self.cluster.pids("worker", node))
        self._kill(node.process.pid)
        self.cluster.forget(node)
        return f"{node.process.pid} with {workers} workers; {self._new_node()}", workers > 1

    def node_left(self):
        node = self._spare_node()
        if node is None:
            return None
        node.process.terminate()
        self.cluster.until(lambda: node.process.poll() is not None, 30, "a node that was asked to leave does not end")
        if node.process.returncode != 0:
            raise Stuck(f"a node that was asked to leave ended with {node.process.returncode}")
        self.cluster.forget(node)
        return f"{node.process.pid}; {self._new_node()}", False

    def node_joined(self):
        if len(self.cluster.nodes) >= 4:
            return None
        return self._new_node(), False

    def scaled(self):
        workers = self.dice.randint(2, MOST_WORKERS)
        done = self.cluster.command("scale", "--workers", str(workers))
        return None if done is None else (f"to {workers}", False)

    def drained(self):
        world = self.cluster.newest()["world"]
        if world < 3:
            return None
        rank = self.dice.randrange(world - 1)
        done = self.cluster.command("drain", str(rank))
        return None if done is None else (f"rank {rank}", False)

    def _cut(self, least, most):
        node = self._spare_node()
        if node is None:
            return None
        workers = len(self.cluster.pids("worker", node))
        self.cluster.network.cut(node.link)
        length = self._wait(least, most)
        self.cluster.network.mend(node.link)
        return f"of {node.process.pid} with {workers} workers for {length:.1f} s", workers > 1

    def link_cut_shortly(self):
        return self._cut(0.1, 2.0)

    def link_cut(self):
        return self._cut(4.0, 12.0)

    def nodes_parted(self):
        if len(self.cluster.nodes) < 2:
            return None
        nodes = self.dice.sample(self.cluster.nodes, 2)
        links = [node.link for node in nodes]
        self.cluster.network.part(links)
        length = self._wait(0.5, 5.0)
        self.cluster.network.rejoin(links)
        return f"{[node.process.pid for node in nodes]} for {length:.1f} s", False

    def link_slow(self):
        node = self.dice.choice(self.cluster.nodes)
        self.cluster.network.slow_down(node.link)
        length = self._wait(2.0, 8.0)
        self.cluster.network.speed_up(node.link)
        return f"of {node.process.pid} for {length:.1f} s", False

    def replace_lost_nodes(self):
        """A node that was cut off for long is told so when it is back, and ends."""
        for node in [node for node in self.cluster.nodes if node.process.poll() is not None]:
            print(f"    node {node.process.pid} has ended with {node.process.returncode}: {self._new_node()}", flush=True)
            self.cluster.forget(node)


def redone(events):
    """Steps that were done again, at each time."""
    found = [re.match(r"steps (\d+) to (\d+)", event["reason"]) for event in events if event["kind"] == "steps_redone"]
    return [int(match[2]) - int(match[1]) + 1 for match in found]


def make_trouble(cluster, chaos, seconds, seen):
    """Until the time is over; `seen` gets the times until training went on, by kind."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        time.sleep(chaos.dice.uniform(0.0, 3.0))

        def has_mirrors():  # alone a worker has none
            chaos.replace_lost_nodes()
            return cluster.newest()["world"] >= 2

        cluster.until(has_mirrors, 40, "one worker is left")
        kind, before = chaos.next_kind(), cluster.events()
        at, step = time.monotonic() - began, cluster.newest()["step"]
        done = getattr(chaos, kind)()
        if done is None:
            continue
        what, may_lose = done
        took = cluster.until(cluster.watch.is_settled, chaos.bound_s(kind),
                             f"{kind} {what}: no word of it, or no generation")
        now = cluster.newest()["step"]
        took += cluster.until(lambda: cluster.newest()["step"] >= now + 3, chaos.bound_s(kind) - took,
                              f"{kind} {what}: training does not go on")
        seen[kind].append(took)
        new = cluster.events()[len(before):]
        again, lost = redone(new), [event for event in new if event["kind"] == "state_lost"]
        print(f"{at:7.1f} s, step {step}: {kind} {what}: on after {took:.2f} s"
              + (f", {sum(again)} steps done again" if again else "") + (", from a checkpoint" if lost else ""), flush=True)
        if lost and not may_lose:
            raise Stuck(f"the state was lost: {lost[0]['reason']}")
        if again and not lost and max(again) > 1:
            raise Stuck(f"{max(again)} steps were done again")


def stop(cluster):
    cluster.coordinator.terminate()
    if cluster.coordinator.wait(60) != 0:
        raise Stuck(f"the coordinator ended with {cluster.coordinator.returncode}: {cluster.last_event()}")
    # A node that was cut off until now hears nothing of the end, and gives its coordinator up.
    deadline = time.monotonic() + COORDINATOR_TIMEOUT_S + 15
    while cluster.processes():
        if time.monotonic() > deadline:
            raise Stuck(f"still there after the run: {cluster.processes()}")
        time.sleep(0.05)


def compare(program, folder, run_dir):
    """Trains the same steps with nothing happening; the greatest relative difference of a loss."""
    metrics = {line["step"]: line for line in lines_of(run_dir / "metrics.jsonl")}
    samples = {line["step"]: line["samples"] for line in lines_of(run_dir / "samples.jsonl")}
    steps = len(metrics)
    if sorted(metrics) != list(range(1, steps + 1)) or sorted(samples) != sorted(metrics):
        raise Stuck("metrics.jsonl or samples.jsonl lacks steps")
    print(f"the undisturbed run of {steps} steps …", flush=True)
    fixed = folder / "fixed"
    subprocess.run([program, "train", folder / "chaos.toml", "--workers", "2", "--set", f"run.dir={fixed}", "--set",
                    f"train.steps={steps}", "--set", "checkpoint.every=0"], check=True, stdout=subprocess.DEVNULL)
    expected = {line["step"]: line for line in lines_of(fixed / "metrics.jsonl")}
    wrong = [line["step"] for line in lines_of(fixed / "samples.jsonl") if samples[line["step"]] != line["samples"]]
    if wrong:
        raise Stuck(f"other samples in step {wrong[0]} and {len(wrong) - 1} more")
    return max((abs(metrics[step]["loss"] / expected[step]["loss"] - 1), step) for step in metrics)


def summarize(cluster, status, seen, seconds):
    metrics = lines_of(cluster.run_dir / "metrics.jsonl")
    events = cluster.events()
    again = redone(events)
    useful = {line["step"]: line["step_s"] for line in metrics}
    print(f"\n{'event':<32}{'times':>7}{'training on after, worst':>28}{'median':>10}")
    for kind in sorted(seen):
        print(f"{kind:<32}{len(seen[kind]):>7}{max(seen[kind]):>26.2f} s{statistics.median(seen[kind]):>8.2f} s")
    print(f"\n{sum(map(len, seen.values()))} events in {seconds / 60:.1f} min; {len(useful)} steps in "
          f"{len({line['generation'] for line in metrics})} generations; {sum(again)} steps done again, at most "
          f"{max(again, default=0)} at once; {sum(event['kind'] == 'state_lost' for event in events)} times back to a "
          f"checkpoint")
    print(f"goodput: {100 * sum(useful.values()) / seconds:.1f} % of the time went into steps that count"
          + (f" (muster status, since its coordinator started: {100 * json.loads(status)['goodput']:.1f} %)" if status else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--muster", type=pathlib.Path, default=ROOT / "build/tools/muster/muster")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--keep", type=pathlib.Path, default=None, help="a new folder for the run, kept afterwards")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 100000
    folder = (options.keep or pathlib.Path(tempfile.mkdtemp(prefix="muster-chaos-"))).resolve()
    write_corpus(folder / "corpus")
    (folder / "chaos.toml").write_text(CONFIG)
    network = Network()
    print(f"seed {seed}, in {folder}")
    if network.trouble:
        print(f"links are left alone: {network.trouble}")
    else:
        print(f"links are slowed down by: {network.slowness or 'nothing, as this kernel has neither netem nor tbf'}")
    failure, cluster, seen = None, None, collections.defaultdict(list)
    try:
        cluster = Cluster(options.muster.resolve(), folder, network)
        cluster.add_node(2)
        cluster.add_node(2)
        cluster.until(lambda: cluster.newest()["step"] >= 3, 60, "it does not begin to train")
        began = time.monotonic()
        try:
            make_trouble(cluster, Chaos(cluster, random.Random(seed)), 60 * options.minutes, seen)
            status = cluster.command("status", "--json")
        finally:
            seconds = time.monotonic() - began
        stop(cluster)
        summarize(cluster, status, seen, seconds)
        worst, step = compare(options.muster.resolve(), folder, cluster.run_dir)
        print(f"samples: the same; losses: at most {worst:.1e} apart (step {step}), allowed {TOLERANCE:.0e}")
        if worst > TOLERANCE:
            raise Stuck("the losses are not those of the undisturbed run")
    except Stuck as stuck:
        failure = stuck
    finally:
        if cluster:
            cluster.close()
        network.close()
    if failure:
        sys.exit(f"FAILED (seed {seed}): {failure}\nlook into {folder}")
    if options.keep is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
