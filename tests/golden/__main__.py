"""``python -m tests.golden``: run every case small and say which bits moved since the digests were kept.

    python -m tests.golden                    compare with tests/golden/digests.json
    python -m tests.golden --against REV      compare with what another commit gives here, by tensor and column
    python -m tests.golden --keep             write the digests of this commit, for this processor
    python -m tests.golden --device cuda      run each case twice there: are they equal, and near what is kept?
    python -m tests.golden algorithm fleet/   only the cases whose names begin so

The digests of floats are kept by processor. On one that has none, whole numbers are compared exactly and a few floats to 0.1 %;
``--against`` compares every bit anywhere. The exit status is 1 where something moved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedfleet
from tests.golden.cases import GOLDEN, config
from tests.golden.digests import Found, by_part, moved, near, of_run, processor

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("digests.json")


@contextmanager
def cluster() -> Iterator[Callable[[], str]]:
    """Give the address of a Ray cluster of this process's own, which starts when it is first asked for."""
    started: list[Any] = []

    def address() -> str:
        from ray.cluster_utils import Cluster

        if not started:
            head = {"num_cpus": 4, "num_gpus": torch.cuda.device_count(), "include_dashboard": False}
            started.append(Cluster(initialize_head=True, head_node_args=head))
        return started[0].address

    try:
        yield address
    finally:
        for one in started:
            one.shutdown()


def found(names: Sequence[str], device: str = "cpu", show: bool = False) -> Iterator[tuple[str, Found]]:
    """Run cases on a device and yield their digests."""
    with tempfile.TemporaryDirectory() as folder, cluster() as address:
        for i, name in enumerate(names):
            started = time.perf_counter()
            try:
                given = config(name)
                where = {"executor.address": address()} if given.executor.kind == "ray" else {}
                if device == "cuda":
                    where |= {"executor.gpus_per_actor": 0.25} if where else {"executor.device": device}
                run = fedfleet.run(given, where, out=Path(folder) / str(i), progress=False)
            except fedfleet.FedfleetError as e:
                raise SystemExit(f"{name}: {e}") from e
            yield name, of_run(run.folder)
            if show:
                took = time.perf_counter() - started
                print(f"[{i + 1}/{len(names)}] {name}: {took:.1f} s", file=sys.stderr, flush=True)


def on_device(names: Sequence[str], device: str) -> dict[str, list[str]]:
    """Return by case what differs between two runs on a device, and floats that are far from those kept of a CPU."""
    differences: dict[str, list[str]] = {}
    of_cpu = kept()
    for name in names:
        try:
            (_, one), (_, two) = found([name, name], device, show=True)
        except SystemExit as e:
            differences[name] = [str(e)]
            continue
        differences[name] = [f"{part} (two runs)" for part in moved(one.counts | one.numbers, two.counts | two.numbers)]
        if not near(of_cpu[name].close, one.close):
            differences[name].append(f"floats, beyond rounding: {of_cpu[name].close} on a CPU, {one.close}")
    return differences


@dataclass(frozen=True)
class Digests:
    """The digests of a case as they are kept: by part, those of floats by processor."""

    counts: Mapping[str, str]
    numbers: Mapping[str, Mapping[str, str]]
    close: Sequence[float]

    @classmethod
    def of(cls, new: Found, others: Mapping[str, Mapping[str, str]]) -> Digests:
        """Return what is kept of a run, and of other processors as long as nothing moved."""
        numbers = {**others, processor(): by_part(new.numbers)}
        return cls(by_part(new.counts), numbers, [float(f"{x:.6g}") for x in new.close])

    def differences(self, new: Found) -> list[str]:
        """Return the parts that moved."""
        parts = [f"{part} (whole numbers, names)" for part in moved(self.counts, by_part(new.counts))]
        here = self.numbers.get(processor())
        if here is not None:
            parts += [f"{part} (floats)" for part in moved(here, by_part(new.numbers))]
        elif not near(self.close, new.close):
            parts.append(f"floats, beyond rounding: {self.close} before, {new.close} now")
        return parts


def kept() -> dict[str, Digests]:
    """Return the digests that are kept."""
    return {name: Digests(**row) for name, row in json.loads(KEPT.read_text(encoding="utf-8")).items()}


def keep(rows: Mapping[str, Digests]) -> None:
    """Write digests, a line a case."""
    lines = (f"{json.dumps(name)}: {json.dumps(vars(row), allow_nan=True)}" for name, row in sorted(rows.items()))
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def elsewhere(revision: str, names: Sequence[str]) -> dict[str, Found]:
    """Return what another commit gives on this machine; it brings its own cases."""
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder) / "tree", Path(folder) / "digests.json"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision], cwd=ROOT, check=True, capture_output=True
        )
        try:
            environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
            command = [sys.executable, "-m", "tests.golden", "--out", str(out), *names]
            subprocess.run(command, cwd=tree, check=True, env=environment)
            return {name: Found(**row) for name, row in json.loads(out.read_text()).items()}
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True, capture_output=True
            )


def main() -> int:
    """Compare, keep, or write."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="the beginnings of names; all cases by default")
    parser.add_argument("--against", metavar="REV", help="compare with this commit instead of what is kept")
    parser.add_argument("--keep", action="store_true", help="write the digests of this commit")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: twice, beside what is kept")
    parser.add_argument("--out", type=Path, help="write every digest to this file, and compare nothing")
    args = parser.parse_args()
    names = [name for name in GOLDEN if not args.cases or name.startswith(tuple(args.cases))]
    differences: dict[str, list[str]] = {}
    near_by: set[str] = set()
    new = dict(found(names, show=True)) if args.device == "cpu" else {}
    if args.out:
        args.out.write_text(json.dumps({name: row._asdict() for name, row in new.items()}), encoding="utf-8")
        return 0
    if args.device != "cpu":
        differences = on_device(names, args.device)
    elif args.against:
        before = elsewhere(args.against, names)
        for name, row in new.items():
            old = before.get(name)
            changed = ["not there before"] if old is None else moved(old.counts | old.numbers, row.counts | row.numbers)
            differences[name] = changed
    else:
        before_here = kept() if KEPT.exists() else {}
        for name, row in new.items():
            differences[name] = before_here[name].differences(row) if name in before_here else ["no digest is kept"]
            if not differences[name] and processor() not in before_here[name].numbers:
                near_by.add(name)
        if args.keep:
            rows = {name: before_here[name] for name in GOLDEN if name in before_here}
            for name, row in new.items():
                still = rows[name].numbers if name in rows and not differences[name] else {}
                rows[name] = Digests.of(row, still)
            keep(rows)
    for name, changed in differences.items():
        if changed:
            print(f"{name}: moved: {', '.join(changed)}")
    count = sum(map(bool, differences.values()))
    print(f"{len(names) - count - len(near_by)} of {len(names)} cases are equal ({processor()})")
    if near_by:
        print(
            f"{len(near_by)} more have no bits kept for this processor: what is whole is equal, and a few floats are near"
        )
    return 1 if count and not args.keep else 0


if __name__ == "__main__":
    sys.exit(main())
