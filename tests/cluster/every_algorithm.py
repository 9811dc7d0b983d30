"""``python -m tests.cluster.every_algorithm --nodes 2 4``: every algorithm on several nodes, to the bytes of one process.

Nodes have addresses of their own (Linux, as root). Without an algorithm's name all are run, a few rounds each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import yaml

import fedfleet
from benchmarks.cluster.nodes import missing, nodes
from fedfleet.config.schema import load, with_overrides
from fedfleet.experiments.workers import Workers
from tests.chaos.soak import BASE, CASES, unlike


def on_cluster(folder: Path, address: str, actors: int) -> None:
    """Run all configurations of a folder, one after the other on the same actors."""
    with closing(Workers()) as workers:
        for path in sorted(folder.glob("*.yaml")):
            config = load(path, {"executor.address": address, "executor.actors": actors})
            fedfleet.Experiment(config).run(folder / f"{actors}" / path.stem, workers=workers)
            print(f"{actors} nodes: {path.stem}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the comparison; the exit status is 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.every_algorithm", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="ALGORITHM")
    parser.add_argument("--in-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_folder:  # on the first node
        on_cluster(args.in_folder, args.address, args.nodes[0])
        return 0
    if (why := missing()) is not None:
        parser.error(why)
    bad = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in args.cases:
            config = load(BASE, CASES[name] | {"rounds": args.rounds, "executor.cpus_per_actor": 1.0})
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
            fedfleet.Experiment(with_overrides(config, {"executor.kind": "local"})).run(folder / "1" / name)
        for size in args.nodes:
            with nodes(size) as there:
                me = [sys.executable, "-m", "tests.cluster.every_algorithm", "--nodes", str(size)]
                if there.head.popen([*me, "--in-folder", folder, "--address", there.address]).wait():
                    return 1
            found = {name: unlike(folder / str(size) / name, folder / "1" / name) for name in args.cases}
            bad += sum(map(bool, found.values()))
            print(f"{size} nodes: {sum(not f for f in found.values())} of {len(found)} algorithms equal to one process")
            for name, files in found.items():
                if files:
                    print(f"  {name}: {', '.join(files)} differ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
