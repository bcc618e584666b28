"""Runs `muster train` for the scripts that measure or check it, and watches what it writes."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time


class MusterRun:
    """One finished run: `metrics`, `samples` and `events` (the lines of their .jsonl, in order), `arrivals` (seconds
    from the start of the process to the line of each step), `config` (the path of the resolved one) and
    `folder`, which is removed by close()."""

    def __init__(self, program, config, settings, steps, patience_s=300.0, finish=False, on_step=None):
        """Trains with `settings` ({"section.key": value}) until `steps` steps are written, or on_step(self),
        which is called when there are more, returns True; then leaves at once, without a checkpoint; with
        `finish`, waits for the run's own end. Raises RuntimeError with the program's last words when it ends
        early or takes longer than `patience_s`."""
        self.program, self._on_step = program, on_step
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="muster-run-"))
        self.run_dir = self.folder / "run"
        self.config = self.run_dir / "config.toml"
        self.metrics, self.arrivals, self._rest = [], [], b""
        arguments = [program, "train", str(config), "--set", f"run.dir={self.run_dir}"]
        for key, value in settings.items():
            arguments += ["--set", f"{key}={json.dumps(value) if isinstance(value, (bool, list)) else value}"]
        with open(self.folder / "output", "wb") as output:
            self._start = time.perf_counter()
            self._process = subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True)
        try:
            self._watch(steps, patience_s)
            if finish:
                self._process.wait(patience_s)
        finally:
            self._leave()
        self.samples, self.events = self.lines("samples"), self.lines("events")

    def lines(self, name):
        """The whole lines of NAME.jsonl so far."""
        path = self.run_dir / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def print_events(self):
        """And what the workers' logs say about how each generation began."""
        for event in self.lines("events"):
            print(f"  step {event['step']:5}  {event['kind']:20} {event['duration_s']:7.3f} s  {event['reason'][:160]}")
        for log in sorted((self.run_dir / "logs").glob("*")):
            for line in log.read_text(errors="replace").splitlines():
                if " begins: " in line:
                    print(" ", line)

    def now(self):
        """Seconds since the start of the process, as in `arrivals`."""
        return time.perf_counter() - self._start

    def command(self, name, *arguments):
        """Runs `muster NAME RUN ARGUMENTS`; its output."""
        return subprocess.check_output([self.program, name, str(self.run_dir), *arguments], text=True, timeout=30)

    def pids(self, role):
        """Of the run's processes `muster ROLE`, eldest first."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue  # no process, or it has ended meanwhile
            if int(stat[3]) == self._process.pid and stat[0] != "Z" and words[1:2] == [role.encode()]:
                found.append(int(entry.name))
        return sorted(found)

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self, steps, patience_s):
        lines = None
        while len(self.metrics) < steps:
            ended = self._process.poll() is not None
            if lines is None and (self.run_dir / "metrics.jsonl").exists():
                lines = open(self.run_dir / "metrics.jsonl", "rb")
            if lines is not None and os.fstat(lines.fileno()).st_ino != os.stat(lines.name).st_ino:
                # Written anew, without steps that are done again.
                lines.close()
                lines = open(self.run_dir / "metrics.jsonl", "rb")
                kept, self._rest = 0, b""
                while kept < len(self.metrics):
                    place, line = lines.tell(), lines.readline()
                    if not line.endswith(b"\n") or json.loads(line) != self.metrics[kept]:
                        lines.seek(place)
                        break
                    kept += 1
                del self.metrics[kept:], self.arrivals[kept:]
            found = lines is not None and self._take(lines.read())
            if found:
                if self._on_step and self._on_step(self):
                    break
                continue
            if ended or time.perf_counter() - self._start > patience_s:
                words = (self.folder / "output").read_text(errors="replace")[-3000:]
                self.print_events()
                raise RuntimeError(f"muster train {'ended' if ended else 'was stopped'} after "
                                   f"{len(self.metrics)} of {steps} steps:\n{words}")
            time.sleep(0.001)
        lines.close()

    def _take(self, piece):
        now = self.now()
        *whole, self._rest = (self._rest + piece).split(b"\n")
        self.metrics += [json.loads(line) for line in whole]
        self.arrivals += [now] * len(whole)
        return bool(whole)

    def _leave(self):
        """Two interrupts: leave now."""
        for _ in range(2):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                time.sleep(0.05)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
