"""``python noting.py CONFIG OUT ADDRESS NOTES``: a run on a cluster, slowly; NOTES has a file a node, a byte a block begun there.

A node that says nothing for some seconds is taken for dead.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import fedfleet
from fedfleet.config.schema import load
from fedfleet.simulator.executors.ray import RayExecutor


@dataclass(frozen=True)
class Noted:
    """A job that writes down where it runs, a byte each time."""

    job: Any
    folder: Path

    def __call__(self, setup, shared, task):
        with (self.folder / ray.util.get_node_ip_address()).open("ab") as file:
            file.write(b".")
        time.sleep(0.2)
        return self.job(setup, shared, task)


class Noting(RayExecutor):
    """Actors that write down where they are."""

    folder: Path

    def map(self, job, shared, tasks, **how):
        return super().map(Noted(job, self.folder), shared, tasks, **how)


if __name__ == "__main__":
    config, out, address, folder = sys.argv[1:]
    x = fedfleet.Experiment(load(config, {"executor.address": address, "executor.actors": 2}))
    executor = Noting(2, address=address, silent_s=3.0)
    executor.folder = Path(folder)
    x.executor = lambda: executor
    x.run(Path(out))
