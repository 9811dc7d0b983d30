"""Several nodes of Ray's on one machine, each with an address, processes and shared memory of its own.

A node is a namespace of each kind that keeps what is another machine's apart: network, processes and mounts. So a driver on one
reaches actors on another by Ray alone, as on a cluster. The first one has a bridge, and the others a cable to it. All of a node
hangs on its first process, which ends as this one does, however that ends: the system then takes away the rest.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

NET, PORT = "10.0.0", 6379
OWN = "/dev/shm"  # mounted anew in each node: Ray's folder and its store
LONG_S = 300.0  # for a command or a condition, on a machine with other work
STORE_BYTES = 100_000_000  # Ray's object store, a node
BRIEF = ["--num-cpus={cpus:g}", "--disable-usage-stats", "--object-store-memory={store}"]
APART = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
FIRST = (  # whose parent is gone is waited for by nobody, and so must be forgotten at once
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); sys.stdin.read()"
)


def missing() -> str | None:
    """Return why there can be no nodes on this machine; None where there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "nodes of their own take Linux, and root"
    if lacks := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"nodes of their own take {', '.join(lacks)}"
    links = "ip link add hub type bridge && ip link add name plug type veth peer name cable"
    if subprocess.run([*APART, "sh", "-c", links], capture_output=True, check=False).returncode:
        return "this machine lets no process have a network of its own"
    return None


class Node:
    """A machine, as far as its processes can tell. ``first`` is the one that has the bridge; None if this is it."""

    def __init__(self, number: int, first: Node | None, environment: Mapping[str, str]):
        self.address, self._cable, self._hub = f"{NET}.{number}", f"node{number}", first or self
        here = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = {**here, "RAY_TMPDIR": OWN, "OMP_NUM_THREADS": "1", **environment}
        own = f'mount -t tmpfs tmpfs {OWN} && exec "$0" -I -S -c "$1"'
        self._apart = subprocess.Popen(
            [*APART, "sh", "-c", own, sys.executable, FIRST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it complains of its end
            start_new_session=True,
        )
        assert self._apart.stdout is not None
        assert self._apart.stdout.readline() == b"up\n", "the node has not come up"
        self.pid = next(pid for pid, parent in _parents() if parent == self._apart.pid)
        self._space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        if first is None:
            self._ip("link add hub type bridge", f"addr add {self.address}/24 dev hub", "link set hub up")
            self._ip("link set lo up", "route add default dev hub")
        else:
            first._ip(f"link add {self._cable} type veth peer name eth0 netns {self.pid}")
            first._ip(f"link set {self._cable} master hub up")
            self._ip(f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up")
            self._ip(f"route add default via {first.address}")

    def _ip(self, *commands: str) -> None:
        inside = ["nsenter", "-t", str(self.pid), "-n", "ip", "-batch", "-"]
        subprocess.run(inside, input="\n".join(commands), text=True, check=True, capture_output=True)

    def popen(self, command: Sequence[Any], environment: Mapping[str, str] | None = None, **how: Any) -> Any:
        """Start a command on this node, in the current folder.

        The process that is returned waits for it out here: a shell, since nsenter itself would stop as the node is frozen.
        """
        inside = ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-F", "sh", "-c", 'cd "$0" && "$@"; exit $?']
        env = {**self._environment, **(environment or {})}
        return subprocess.Popen(
            [*inside, how.pop("cwd", Path.cwd()), *map(str, command)], env=env, start_new_session=True, **how
        )

    def run(self, command: Sequence[Any], environment: Mapping[str, str] | None = None, **how: Any) -> str:
        """Run a command on this node; return what it prints. Raises AssertionError with that where it fails."""
        with tempfile.TemporaryFile() as said:  # a pipe would be held open by what goes on in the background
            started = self.popen(command, environment, stdout=said, stderr=said, **how)
            try:
                status = started.wait(LONG_S)
            finally:
                started.kill()
            said.seek(0)
            text = said.read().decode(errors="replace")
        assert status == 0, f"{command}: {text}"
        return text

    def processes(self) -> dict[int, str]:
        """Return the processes of this node, its first one left out: numbers out here, and command lines."""
        found = {}
        for pid, _ in _parents():
            with suppress(OSError):
                if pid != self.pid and Path(f"/proc/{pid}/ns/pid").readlink() == self._space:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return found

    def signal(self, what: signal.Signals, name: str = "") -> int:
        """Send a signal to the processes whose command lines have a name; return to how many."""
        told = 0
        for pid, command in self.processes().items():
            if name in command:
                with suppress(ProcessLookupError):
                    os.kill(pid, what)
                    told += 1
        return told

    def raylet(self) -> bool:
        """Say whether Ray's process that keeps the actors is there."""
        return any("/raylet/raylet " in command for command in self.processes().values())

    def kill_raylet(self) -> None:
        """Kill the process that keeps the actors of this node."""
        assert self.signal(signal.SIGKILL, "/raylet/raylet ")

    def freeze(self) -> None:
        """Stop all that runs on this node, also what is being started."""
        before = -1
        while (now := self.signal(signal.SIGSTOP)) != before:
            before = now

    def thaw(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def cut(self) -> None:
        """Pull the cable out: nothing comes through to this node, nor from it, and no process is told."""
        self._hub._ip(f"link set {self._cable} down")

    def fix(self) -> None:
        """Put it in again."""
        self._hub._ip(f"link set {self._cable} up")

    def close(self) -> None:
        """Have it all gone at once, as where the power fails."""
        if self._apart.returncode is None:  # else its number may be another's by now
            os.kill(self.pid, signal.SIGKILL)
            self._apart.communicate()


class Nodes:
    """Nodes on one network; ``head`` is the first, ``others`` those that came to it and were not removed."""

    def __init__(self, stack: ExitStack, cpus: float, store: int, environment: Mapping[str, str]):
        self._stack, self._cpus, self._store = stack, cpus, store
        self._environment, self._numbers = environment, count(2)
        self.head = Node(1, None, environment)
        stack.callback(self.head.close)
        self.others: list[Node] = []
        self.address = f"{self.head.address}:{PORT}"

    def bare(self, **environment: str) -> Node:
        """Add a node without Ray; its processes have these variables besides."""
        node = Node(next(self._numbers), self.head, {**self._environment, **environment})
        self._stack.callback(node.close)
        self.others.append(node)
        return node

    def start(self) -> None:
        """Start Ray on the first node."""
        self._start(self.head, "--head", f"--port={PORT}", "--include-dashboard=false")

    def add(self, **environment: str) -> Node:
        """Add a node that joins Ray."""
        node = self.bare(**environment)
        self._start(node, f"--address={self.address}")
        return node

    def remove(self, node: Node) -> None:
        """Take a node away, whatever runs on it."""
        node.close()
        self.others.remove(node)

    def _start(self, node: Node, *how: str) -> None:
        node.run([_beside("ray"), "start", *how, *(word.format(cpus=self._cpus, store=self._store) for word in BRIEF)])


@contextmanager
def nodes(
    size: int, *, cpus: float = 1.0, store: int = STORE_BYTES, ray: bool = True, **environment: str
) -> Iterator[Nodes]:
    """Yield so many nodes; nothing is left of them. With ``ray``, a cluster of nodes of so many CPUs and bytes of store each.

    ``environment`` is what variables their processes have besides this one's.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()} if ray else {}
    with ExitStack() as stack:
        found = Nodes(stack, cpus, store, {**token, **environment})
        if ray:
            found.start()
        for _ in range(size - 1):
            found.add() if ray else found.bare()
        yield found


def _parents() -> Iterator[tuple[int, int]]:
    """Yield each process and its parent."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _beside(name: str) -> str:
    """Return the path of a program that was installed with this Python."""
    return str(Path(sys.executable).with_name(name))


def wait_for(what: Any, seconds: float = LONG_S) -> None:
    """Wait until something is so."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"not so after {seconds:g} s"
        time.sleep(0.1)
