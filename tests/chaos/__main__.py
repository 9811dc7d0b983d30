"""``python -m tests.chaos --minutes 5``: soak runs of one algorithm after the other until the time is over."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

from tests.chaos.soak import CASES, FAULTS, soak


def main() -> int:
    """Run the soak; the exit status is 1 where anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no further run after so many minutes")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of a run")
    parser.add_argument(
        "--every", type=float, nargs=2, default=(1.0, 3.0), metavar=("LEAST", "MOST"), help="seconds between faults"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw, started, reports = random.Random(args.seed), time.monotonic(), []
    faults = [*FAULTS, *FAULTS, *draw.sample([*FAULTS], 2)]
    for case in cycle(CASES):
        with tempfile.TemporaryDirectory() as folder:
            found = soak(case, Path(folder), draw, rounds=args.rounds, faults=faults, every_s=tuple(args.every))
        reports.append(found)
        what = ", ".join(f"{n} x {fault}" for fault, n in sorted(found.faults.items()))
        verdict = f"LOST: {', '.join(found.lost)}" if found.lost else "equal to the undisturbed run"
        print(f"{case}: {found.rounds} rounds in {found.seconds:.0f} s; {what}; {verdict}", flush=True)
        if time.monotonic() - started > 60 * args.minutes:
            break
    total = sum((Counter(r.faults) for r in reports), Counter[str]())
    lost = sum(len(r.lost) for r in reports)
    print(f"\n{'fault':45} injected recovered")
    for fault in FAULTS:
        bad = sum(r.faults.get(fault, 0) for r in reports if r.lost)
        print(f"{fault:45} {total[fault]:8} {total[fault] - bad:9}")
    print(f"{sum(total.values())} faults in {len(reports)} runs, results lost: {lost}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
