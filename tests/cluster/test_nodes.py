"""Nodes of their own on one machine: they reach one another, can be frozen and cut off, and leave nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster.nodes import Node, missing, nodes, wait_for

ROOT = Path(__file__).resolve().parents[2]
WHY = missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

SERVE = "import socket; s = socket.create_server(('0.0.0.0', 7)); print('up', flush=True)\nwhile True: s.accept()[0].send(b'here')"
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 7), timeout=0.5).recv(4))"
HOLD = """
import sys
from benchmarks.cluster.nodes import nodes
with nodes(2, ray=False) as found:
    for node in (found.head, *found.others):
        node.popen(["sleep", "1000"])
    found.others[0].freeze()
    print(*(p for n in (found.head, *found.others) for p in (n.pid, n._apart.pid)), flush=True)
    sys.stdin.read()
"""


def serve(node: Node) -> None:
    server = node.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"up\n"


def answers(asked: Node, by: Node) -> bool:
    done = by.popen([sys.executable, "-c", ASK, asked.address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return b"here" in done.communicate()[0]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def links() -> str:
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


def test_nodes_reach_one_another_but_for_one_that_is_frozen_or_cut_off():
    before = links()
    with nodes(2, ray=False) as found:
        one, other = found.head, *found.others
        serve(other)
        seen = other.processes()
        assert answers(other, one)
        assert "eth0" in other.run(["ip", "-br", "addr"])
        other.freeze()
        assert not answers(other, one)
        other.thaw()
        assert answers(other, one)
        other.cut()
        assert not answers(other, one)
        other.fix()
        wait_for(lambda: answers(other, one), 20)
        assert one.processes() == {}
        third = found.bare()
        assert answers(other, third)
        found.remove(other)
        assert not answers(other, third)
    assert not [pid for pid in seen if running(pid)]
    assert links() == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_nodes_however_their_process_ends(how: signal.Signals):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 4
        assert all(running(pid) for pid in pids)
        os.kill(process.pid, how)
        process.wait(20)
        wait_for(lambda: not [pid for pid in pids if running(pid)], 20)
