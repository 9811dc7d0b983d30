"""Bytes that secure aggregation adds, and how often it is aborted: exactly, and among simulated exchanges. A minute.

python -m benchmarks.secure_aggregation
python -m benchmarks.secure_aggregation --part rounds     time in the simulator, in turns with rounds without it
python -m benchmarks.secure_aggregation --part executed   rounds of a linear net with real masks
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks import command, turns, world
from benchmarks.cases import CASES
from benchmarks.peers.workload import Case
from fedfleet.middleware.secure_aggregation.secured import secured
from fedfleet.middleware.secure_aggregation.wrap import costs
from fedfleet.simulator.arithmetic import rng
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.fleet.devices import Load
from fedfleet.simulator.fleet.responses import Federation
from fedfleet.simulator.fleet.secagg import exchange
from fedfleet.simulator.secure import Secure

FLOATS, BITS, EXCHANGES = 50_890, 16, 500
GONE, THRESHOLDS = (0.1, 0.2, 0.3, 0.4), (0.5, 0.67, 0.8)
KINDS = (("secagg", None), ("secagg_plus, k 20", 20), ("secagg_plus, k 50", 50))


def secure(most: int, neighbours: int | None, threshold: float = 0.67, gone: float = 0.0) -> Secure:
    """Return how a net's mean is added up, by clients a share of whom goes after it has shared its keys."""
    return Secure(
        threshold=threshold,
        neighbours=neighbours,
        bits=BITS,
        rounding="stochastic",
        clip={"z": 1.0},
        weighted=("z",),
        weight_bound=1000,
        most=most,
        numbers=FLOATS + 1,
        dropout={"masked": gone},
        mask_flop=0.0,
    )


def sent() -> Iterator[str]:
    """Yield rows of what one client sends and gets, kB, where nobody goes."""
    yield "| clients | bits masked | masked, kB up | protocol | besides, kB up | besides, kB down | all up, of 32-bit floats |"
    yield "|---|---|---|---|---|---|---|"
    for n in (50, 100, 200):
        for name, k in KINDS:
            if k is None or k < n - 1:
                how = secure(n, k)
                c = costs(how, n)
                share = (c["masked"] + c["besides_up"]) / (4 * FLOATS)
                numbers = (
                    f"{c['masked'] / 1e3:.1f} | {name} | {c['besides_up'] / 1e3:.2f} | {c['besides_down'] / 1e3:.2f}"
                )
                yield f"| {n} | {how.modulus_bits} | {numbers} | {share:.1%} |"


def aborted(n: int, how: Secure) -> float:
    """Return the share of exchanges that are aborted."""
    clients, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    found = 0
    for i in range(EXCHANGES):
        key = rng.fold(rng.key(0), i)
        _, went = exchange(how, Federation(), clients, zero, Load(zero + 1, zero + 1), 0.0, key, key)
        assert went is not None
        found += went.aborted is not None
    return found / EXCHANGES


def aborts(n: int = 100) -> Iterator[str]:
    """Yield rows of how often an exchange is aborted."""
    yield "| protocol | threshold | " + " | ".join(f"{g:.0%} go" for g in GONE) + " |"
    yield "|---|---|" + "---|" * len(GONE)
    for name, k in KINDS:
        for t in THRESHOLDS:
            shares = " | ".join(f"{aborted(n, secure(n, k, t, g)):.1%}" for g in GONE)
            yield f"| {name} | {t:g} | {shares} |"


def _added_up(plain: world.World, **given: Any) -> world.World:
    """Return a case whose messages are added up securely, by 16 bits a number."""
    z, algorithm, case = plain.task.init(plain.case.seed), plain.algorithm, plain.case
    how = secure(case.cohort, None)
    how = replace(how, weighted=(), weight_bound=1, numbers=T.count(z), **given)
    sent = {p.name: {slot: z for slot in p.reduce} for p in algorithm.phases}
    return replace(plain, algorithm=secured(algorithm, {p.name: how for p in algorithm.phases}, sent))


def rounds(case: Case, number: int) -> Iterator[str]:
    """Yield milliseconds a round of each way, medians, in turns."""
    plain = world.build(case)
    how, many = world.rule(plain), case.warmup + number
    ways = {"none": plain} | {r: _added_up(plain, rounding=r) for r in ("stochastic", "nearest")}
    with ExitStack() as stack:
        under_way = {
            name: (r.seconds for r in world.play(one, stack.enter_context(closing(LocalExecutor(1))), how, many))
            for name, one in ways.items()
        }
        found = turns.taken(under_way, case, number, "none", ways)
    yield f"{case.name}, {case.cohort} clients, one process, one thread"
    for name, ms in found["ms"].items():
        yield f"{name:10} {ms:8.1f} ms a round, {found['over'][name]['median']:.2f} times that without"


def executed(cohorts: tuple[int, ...], number: int) -> Iterator[str]:
    """Yield seconds a round, medians, of linear nets whose messages are masked in earnest."""
    for cohort in cohorts:
        one = _added_up(world.build(replace(CASES["logistic"], cohort=cohort)), execute=True)
        with closing(LocalExecutor(1)) as executor:
            seconds = [r.seconds for r in world.play(one, executor, world.How("batched", cohort), number)]
        yield f"{cohort} clients: {median(seconds):.2f} s a round"


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.secure_aggregation", __doc__)
    ask.add_argument("--part", choices=("tables", "rounds", "executed"), default="tables", help="(default %(default)s)")
    ask.add_argument("--turns", type=command.count, default=12, help="rounds of each (default %(default)d)")
    args = ask.parse_args(argv)
    torch.set_num_threads(1)
    parts = {
        "tables": lambda: (*sent(), "", *aborts()),
        "rounds": lambda: rounds(CASES["mlp"], args.turns),
        "executed": lambda: executed((20, 40), min(args.turns, 3)),
    }
    for line in parts[args.part]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
