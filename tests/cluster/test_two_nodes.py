"""The tutorial on two nodes, executed on two nodes; a run whose clients have states while one is frozen."""

import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pandas as pd
import pytest
import yaml

import fedfleet
from benchmarks.cluster.nodes import Node, missing, nodes, wait_for
from fedfleet.config.schema import load

ROOT = Path(__file__).resolve().parents[2]
WHY = missing()
pytestmark = [pytest.mark.ray, pytest.mark.own_ray, pytest.mark.skipif(WHY is not None, reason=str(WHY))]

SHORT = {"rounds": 3, "population.clients": 20, "cohort.size": 6, "executor.block_size": 2, "evaluation.every": 1}
STATEFUL = {
    "algorithm": {"name": "scaffold", "epochs": 1, "batch_size": 7},
    "task": {"name": "classification", "model": "mlp", "hidden": [14000]},  # whose results are added on their nodes
    "cohort.size": 12,
    "executor.block_size": 1,
    "rounds": 4,
}
SSH = '#!/bin/sh\ncd "$HOME/../$1" && shift && exec "$@"\n'
AUTH = "export RAY_AUTH_MODE=token;"  # which the one who types has done already
NOTING = ROOT / "tests" / "cluster" / "noting.py"
TABLES = ("rounds", "phases", "outcomes", "clients")


class Hand(NamedTuple):
    """Who types on a node: a login with a home, and what was typed is under ``checkout``."""

    node: Node
    checkout: Path
    home: Path

    def types(self, block: str) -> str:
        """Execute the lines of a block, as long as they succeed."""
        bin = self.home / "bin"
        own = {
            "HOME": str(self.home),
            "PATH": f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            # What is installed comes to the login alone; what it needs is there.
            "PIP_TARGET": str(self.home / "packages"),
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # which leaves it out
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONPATH": str(self.home / "packages"),
            "FEDFLEET_DATA": os.environ.get("FEDFLEET_DATA", ""),
        }
        return self.node.run(["sh", "-ec", block], own, cwd=self.checkout)


def login(node: Node, folder: Path) -> Hand:
    """Give a node a home with a checkout, and what reaches other nodes' homes."""
    home = folder / node.address
    (home / "bin").mkdir(parents=True)
    ssh = home / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    return Hand(node, checkout(home / "fedfleet"), home)


def blocks() -> list[str]:
    """Return what is to be typed on the first node, the second, and the first again."""
    page = (ROOT / "docs" / "tutorials" / "two_nodes.md").read_text(encoding="utf-8")
    return [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S) if not kind]


def checkout(to: Path) -> Path:
    """Copy what a checkout has of the package, with a run that is quicker."""
    for name in ("src", "algorithms", "simulator", "tasks", "middleware", "datasets", "configs"):
        shutil.copytree(
            ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    path = to / "configs" / "cdma" / "digits.yaml"
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump(load(given, SHORT).model_dump(mode="json", exclude_unset=True)))
    return to


def check_equal(found: Path, expected: Path) -> None:
    assert (found / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    for name in TABLES:
        if (expected / f"{name}.parquet").exists():
            both = [
                pd.read_parquet(f / f"{name}.parquet").drop(columns="seconds", errors="ignore")
                for f in (found, expected)
            ]
            pd.testing.assert_frame_equal(*both, check_exact=True)
    assert json.loads((found / "summary.json").read_text())["bit_exact"] is True
    assert not (found / "events.jsonl").exists()


def freeze_at_work(node: Node, notes: Path) -> None:
    """Freeze a node once it has begun a block, and its sentry has answered."""
    wait_for(lambda: notes.exists() and any("ray::Sentry" in command for command in node.processes().values()))
    time.sleep(1.5)
    node.freeze()


def test_what_is_typed_by_hand_runs_on_both_nodes_to_the_bytes_of_one_process(tmp_path: Path):
    on_first, on_second, run = blocks()
    with nodes(2, ray=False) as found:
        first, second = (login(node, tmp_path) for node in (found.head, *found.others))
        configs = {"quick": first.checkout / "configs" / "cdma" / "digits.yaml", "stateful": tmp_path / "stateful.yaml"}
        configs["stateful"].write_text(yaml.safe_dump(load({}, SHORT | STATEFUL).model_dump(mode="json")))
        for name, path in configs.items():
            fedfleet.Experiment(load(path, {"executor.kind": "local"})).run(tmp_path / "local" / name)
        first.types(on_first)
        second.types(on_second)
        notes = tmp_path / "notes"
        notes.mkdir()
        out = tmp_path / "stateful"
        freezer = Thread(target=freeze_at_work, args=(second.node, notes / second.node.address), daemon=True)
        freezer.start()
        first.types(f"{AUTH} python {NOTING} {configs['stateful']} {out} {found.address} {notes}")
        second.node.thaw()
        freezer.join()
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        assert [(e["event"], e["node"]) for e in events] == [("node_silent", second.node.address)]
        (out / "events.jsonl").unlink()
        check_equal(out, tmp_path / "local" / "stateful")
        assert {path.name for path in notes.iterdir()} == {first.node.address, second.node.address}
        first.types(AUTH + run)  # with as many actors as CPUs, of which each node has one, and all are waited for
        (out,) = first.checkout.glob("runs/*")
        check_equal(out, tmp_path / "local" / "quick")
        assert not first.node.raylet()
        assert second.node.raylet()
