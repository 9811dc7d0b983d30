"""``python -m tests.cluster.scraped``: what Ray's agent exports of a run, read from its port; needs ``pip install "ray[default]"``.

Starts a head on 127.0.0.1, with a token, and a run on it; then every gauge of ``WHAT`` has to be there, with numbers of that run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from fedfleet.assembly.metrics_export import WHAT
from tests.cluster import heads

PATIENCE_S = 90.0
ACTORS = 2


def main() -> int:
    """Run it; the exit status is 1 where a gauge is missing or says what cannot be."""
    if (why := heads.missing()) is not None:
        print(why)
        return 1
    port, metrics = heads.free(), heads.free()
    options = (f"--metrics-export-port={metrics}", f"--num-cpus={ACTORS}")
    with tempfile.TemporaryDirectory() as folder, heads.head(port, *options) as address:
        executor = json.dumps({"kind": "ray", "address": address, "actors": ACTORS})
        with heads.running(Path(folder, "run"), "rounds=100000", f"executor={executor}") as process:
            found = _scraped(metrics, process)
    for name in WHAT:
        print(f"ray_fedfleet_{name} {found.get(name, 'is missing')}")
    right = (
        found.keys() == WHAT.keys()
        and found["actors"] == ACTORS
        and found["nodes"] == 1
        and found["rounds"] >= 1
        and 0 < found["completed_share"] <= 1
        and found["dead_actors"] == found["retried_blocks"] == 0
        and all(found[name] > 0 for name in ("rounds_per_second", "bytes_up", "bytes_down", "block_seconds"))
    )
    print("as it should be" if right else "not as it should be")
    return int(not right)


def _scraped(port: int, process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Read the agent's port until every gauge is there, or time is up."""
    found, until = dict[str, float](), time.monotonic() + PATIENCE_S
    while found.keys() != WHAT.keys() and time.monotonic() < until and process.poll() is None:
        time.sleep(1.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            lines = page.read().decode().splitlines()
        for line in lines:
            if line.startswith("ray_fedfleet_"):
                name = line.partition("{")[0].removeprefix("ray_fedfleet_")
                found[name] = float(line.rpartition(" ")[2])
    return found


if __name__ == "__main__":
    sys.exit(main())
