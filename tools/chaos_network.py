"""Network namespaces for tools/chaos.py: each node of a run in one of its own, all on one bridge with the coordinator,
so that links can be cut and slowed down. Needs root and `ip`; close() takes everything away again."""
import os
import shutil
import subprocess

SUBNET = "10.213.77"


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Network:
    """`host` is where the coordinator can listen; `trouble` says why there is no network, or is empty."""

    def __init__(self):
        self.host = f"{SUBNET}.1"
        self._tag = f"mc{os.getpid() % 100000}"
        self._links = []
        self._added = 0
        self.trouble = self._set_up()
        self.slowness = "" if self.trouble else self._find_slowness()

    def _set_up(self):
        if os.geteuid() != 0:
            return "not root"
        if shutil.which("ip") is None:
            return "there is no `ip` (iproute2)"
        try:
            ip("link", "add", self._tag, "type", "bridge")
            ip("address", "add", f"{self.host}/24", "dev", self._tag)
            ip("link", "set", self._tag, "up")
            self.add_link()
            self._remove(self._links.pop())
            return ""
        except subprocess.CalledProcessError as error:
            self.close()
            return f"`{' '.join(error.cmd)}`: {error.stderr.strip()}"

    def add_link(self):
        """A new namespace on the bridge; returns its name, which is what the other functions take."""
        # Not the address of one that is gone: the others would for a while look for it where that was.
        number = 2 + self._added % 248
        self._added += 1
        link = f"{self._tag}-{number}"
        self._links.append(link)
        ip("netns", "add", link)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", link)
        ip("link", "set", link, "master", self._tag, "up")
        for words in (["address", "add", f"{SUBNET}.{number}/24", "dev", "eth0"], ["link", "set", "eth0", "up"],
                      ["link", "set", "lo", "up"]):
            ip("-n", link, *words)
        return link

    def remove_link(self, link):
        self._links.remove(link)
        self._remove(link)

    @staticmethod
    def _remove(link):
        ip("link", "delete", link, check=False)
        ip("netns", "delete", link, check=False)

    def _find_slowness(self):
        """How this kernel can slow a link down; empty: not at all."""
        if shutil.which("tc") is None:
            return ""
        # What the second one makes is a queue: whoever sends much waits for a good part of a second.
        ways = ("netem delay 40ms 20ms loss 0.5%", "tbf rate 4mbit burst 16kb latency 400ms")
        return next((way for way in ways if self._qdisc("replace", self._tag, way) and self._qdisc("delete", self._tag)),
                    "")

    @staticmethod
    def _qdisc(verb, device, way=""):
        words = ["tc", "qdisc", verb, "dev", device, "root", *way.split()]
        return subprocess.run(words, capture_output=True).returncode == 0

    def cut(self, link):
        ip("link", "set", link, "down")

    def mend(self, link):
        ip("link", "set", link, "up")

    def part(self, links):
        """These reach the coordinator and not one another."""
        for link in links:
            subprocess.run(["bridge", "link", "set", "dev", link, "isolated", "on"], check=True, capture_output=True)

    def rejoin(self, links):
        for link in links:
            subprocess.run(["bridge", "link", "set", "dev", link, "isolated", "off"], check=True, capture_output=True)

    def slow_down(self, link):
        if not self._qdisc("replace", link, self.slowness):
            raise RuntimeError(f"tc qdisc replace dev {link} root {self.slowness} failed")

    def speed_up(self, link):
        self._qdisc("delete", link)

    def close(self):
        for link in list(self._links):
            self.remove_link(link)
        ip("link", "delete", self._tag, check=False)
