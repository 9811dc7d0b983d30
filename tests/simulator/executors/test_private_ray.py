"""A run on one machine, whose Ray is its own: where its processes listen, and what becomes of it without Ray."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedfleet.simulator.executors.cluster import LOOPBACK
from fedfleet.simulator.executors.session import PREFIX

MARK, CONFIG = "FEDFLEET_TEST_SESSION", "{rounds: 100000, population: {clients: 20}, cohort: {size: 4}}"
LISTENS = "0A"
LOCAL = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
pytestmark = [
    pytest.mark.ray,
    pytest.mark.own_ray,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system has no table of sockets in /proc"),
]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A run under way, all of whose processes carry a mark; (process, mark, run folder)."""
    with under_way(tmp_path_factory.mktemp("private")) as found:
        yield found


@contextmanager
def under_way(folder):
    (folder / "config.yaml").write_text(CONFIG)
    mark, out = f"{os.getpid()}-{time.monotonic_ns()}", folder / "run"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "fedfleet", "run", folder / "config.yaml", "executor.actors=1", "--no-report"]
    with subprocess.Popen(
        [*command, "--out", out], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        until = time.monotonic() + 120
        while not list(out.glob("checkpoints/round-*")):
            assert run.poll() is None, run.communicate()[1]
            assert time.monotonic() < until, "the run has not begun"
            time.sleep(0.2)
        yield run, mark, out
        run.kill()
    for pid in processes(mark):
        os.kill(pid, signal.SIGKILL)


def processes(mark):
    """Return the processes that carry a mark, by number, with their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # another user's, or gone
            continue
    return found


def address(text):
    """Return the address that the table of sockets writes: in words of 32 bits, as they lie in memory."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def listening(pids):
    """Return where processes listen: (command line, address) of each socket."""
    owner = {}
    for pid, command in pids.items():
        for end in Path(f"/proc/{pid}/fd").iterdir():
            try:
                owner.setdefault(str(end.readlink()), command)
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and (who := owner.get(f"socket:[{fields[9]}]")) is not None:
                found.append((who, address(fields[1].partition(":")[0])))
    return found


def test_nothing_listens_beyond_loopback(session):
    _, mark, _ = session
    found = listening(processes(mark))
    for part in ("gcs_server", "raylet/raylet", "fedfleet run", "ClientActor"):
        assert any(part in who for who, _ in found), f"{part} does not listen: {found}"
    assert not [one for one in found if one[1] not in LOCAL]


def folders(mark):
    """Return the folders of Ray's files that processes with a mark have on their command lines."""
    return {Path(at) for command in processes(mark).values() for at in re.findall(rf"/[^\s=:,]*/{PREFIX}\w+", command)}


def test_its_files_are_its_users_alone(session):
    _, mark, _ = session
    (folder,) = folders(mark)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets = [path for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    assert sockets
    assert max(len(str(path)) for path in sockets) < 104


def test_addresses_are_read_as_they_are_written():
    assert address("0100007F") == LOOPBACK
    assert address("00000000") == "0.0.0.0"
    assert address("00000000000000000000000001000000") == "::1"
    assert address("0000000000000000FFFF00000100007F") == "::ffff:127.0.0.1"


def test_a_run_whose_raylet_dies_fails_in_one_line_and_can_go_on(session):
    check_end_without("raylet/raylet", *session)


def test_a_run_whose_control_server_dies_fails_in_one_line_and_can_go_on(tmp_path):
    with under_way(tmp_path) as session:
        check_end_without("gcs_server", *session)


def check_end_without(what, run, mark, out):
    """Kill one of Ray's own processes, and see that the run ends in order and leaves none behind."""
    (folder,) = folders(mark)
    (its,) = [pid for pid, command in processes(mark).items() if what in command.split(" ")[0]]
    os.kill(its, signal.SIGKILL)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 1
    failed = [line for line in said.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 1, said
    assert "go on with `fedfleet resume`" in failed[0]
    assert said.rstrip().endswith(failed[0])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert f"failed: {summary['error']}" == failed[0]
    until = time.monotonic() + 20
    while left := processes(mark):
        assert time.monotonic() < until, left
        time.sleep(0.2)
    assert not folder.exists()
