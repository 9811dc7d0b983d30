"""``python -m tests.cluster.unlike``: a second node without the clients' folder, with another one, with another fedfleet.

Each is refused in one line that names the node; one that has the same is not. Linux, as root.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from benchmarks.cluster.nodes import OWN, Nodes, missing, nodes
from fedfleet.datasets.disk import EXAMPLES
from tests.cluster.test_two_nodes import checkout
from tests.refusals import without_progress
from tests.simulator.executors.test_fingerprint import disk

HERE = f"{OWN}/clients"  # of a node alone
CONFIG = {
    "rounds": 2,
    "population": {"dataset": {"name": "disk", "path": HERE}},
    "task": {"model": "logistic"},
    "cohort": {"size": 4},
    "algorithm": {"batch_size": 2},
    "executor": {"block_size": 2, "cpus_per_actor": 1.0, "actors": 2},
}


def ran(found: Nodes, config: Path, out: Path) -> tuple[int, str]:
    """Run on both nodes; return the exit status and what was said as an error."""
    command = [sys.executable, "-m", "fedfleet", "run", config, f"executor.address={found.address}", "--out", out]
    started = found.head.popen([*command, "--no-report"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = without_progress(started.communicate()[1].decode())
    return started.returncode, said


def check(name: str, found: tuple[int, str], starts: str, ends: str = "") -> bool:
    """Print whether a run was refused in one line that starts and ends so; without a start, whether it was not refused."""
    status, said = found
    refused = status == 1 and said.count("\n") == 1 and said.startswith(starts) and said.endswith(ends)
    good = refused if starts else (status, said) == (0, "")
    print(f"{name}: {'as it should be' if good else f'WRONG: status {status}'}: {said.strip()}", flush=True)
    return good


def main() -> int:
    """Refuse and take nodes; the exit status is 1 where one was not refused, or wrongly."""
    if (why := missing()) is not None:
        sys.exit(why)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as made, nodes(1) as found:
        folder = Path(made)
        config, theirs, data = folder / "config.yaml", checkout(folder / "theirs"), disk(folder)
        config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
        second = found.add(PYTHONPATH=str(theirs / "src"))
        copy = ["cp", "-r", data, HERE]
        found.head.run(copy)

        def at(name: str) -> tuple[int, str]:
            return ran(found, config, folder / name)

        def refused(name: str, why: str, ends: str = "") -> bool:
            return check(name, at(name), f"failed: executor: node {second.address} {why}", ends)

        good = [refused("no folder", "cannot take part: it cannot read the clients' data (No such file")]
        _change(data / EXAMPLES, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
        second.run(copy)
        good.append(refused("another folder", f"has other data than the driver ({HERE} sha256 "))
        _change(data / EXAMPLES, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
        second.run(["rm", "-r", HERE])
        second.run(copy)
        good.append(check("the same", at("the same"), ""))
        _change(theirs / "algorithms" / "fedavg.py", lambda content: content + b"# changed\n")
        good.append(refused("another fedfleet", "is not like the driver's (source of fedfleet: sha256 ", "=true\n"))
    print(f"{sum(good)} of {len(good)} as they should be, in {time.monotonic() - started:.0f} s")
    return int(not all(good))


def _change(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
