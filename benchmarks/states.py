"""Cost of client state: ``python -m benchmarks.states``.

The first part is memory. Each of 100,000 clients of SCAFFOLD, with 40 KB of state each, takes part once, and then a
quarter of them again. The command prints the unique set size of the driver and of every actor on the way. The second
part is time: rounds of LeNet with 12 local steps, by SCAFFOLD and FedAvg in turns.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import command, engine, world
from benchmarks.cases import CASES
from benchmarks.command import say
from benchmarks.memory import look, trends
from benchmarks.peers.workload import Case
from fedfleet.datasets.synthetic import SyntheticOptions, load
from fedfleet.simulator.driver.simulate import simulate
from fedfleet.simulator.fleet.selection import RoundRobin
from fedfleet.tasks.classification import Classification
from fedfleet.tasks.options import DataShape, ModelOptions

FEATURES, CLASSES = 1000, 10  # of a linear model: 10,010 floats
TURNS = 3
AGAIN = 0.25  # share of the clients heard a second time


def memory(clients: int, cohort: int, actors: int) -> dict[str, Any]:
    """Hear everybody once and some again; return what each process holds."""
    options = SyntheticOptions(features=FEATURES, classes=CLASSES, examples=4, test_examples=1)
    case = Case("states", "logistic", (FEATURES,), clients, cohort, 4, batch=4, algorithm="scaffold")
    task = Classification(ModelOptions(model="logistic"), DataShape((FEATURES,), CLASSES))
    ready = world.World(case, task, world.algorithm(case, task), load(options, clients, 0).population)
    rounds = int(clients / cohort * (1 + AGAIN))
    samples = []
    with closing(engine.executor("ray", actors)) as executor:
        how = engine.choose(ready, "batched", 125)
        executor.start(world.setup(ready, how.inner))
        conditions = replace(world.conditions(ready, how), selection=RoundRobin())
        z = task.init(0)
        for record in simulate(ready.algorithm, z, world.problem(ready), conditions, executor, rounds):
            if (record.index + 1) % max(1, rounds // 20) == 0:
                samples.append((record.index + 1, look(executor, actors)))
                held = ", ".join(f"{k} {v / 1e6:,.0f} MB" for k, v in samples[-1][1].items())
                say(f"round {record.index + 1} of {rounds}: {held}; {record.seconds:.2f} s")
    after = [s for s in samples if s[0] >= clients / cohort] or samples[-1:]
    most = {k: max(m[k] for _, m in samples if k in m) for k in samples[-1][1]}
    return {"clients": clients, "cohort": cohort, "samples": samples, "most_bytes": most, "after": trends(after, 0)}


def time(rounds: int, actors: int) -> dict[str, Any]:
    """Return the seconds a round of SCAFFOLD over those of FedAvg, of the median rounds of turns that alternate."""
    case = CASES["lenet"]
    took: dict[str, list[float]] = {"scaffold": [], "fedavg": []}
    for _ in range(TURNS):
        for name, medians in took.items():
            ready = world.build(replace(case, algorithm=name))
            with closing(engine.executor("ray", actors)) as executor:
                played = [r.seconds for r in world.play(ready, executor, world.rule(ready), case.warmup + rounds)]
            medians.append(median(played[case.warmup :]))
    ratios = sorted(a / b for a, b in zip(*took.values(), strict=True))
    return {
        **{f"{name}_s": median(medians) for name, medians in took.items()},
        "ratio": median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
    }


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.states", __doc__)
    ask.add_argument("--clients", type=command.count, default=100_000)
    ask.add_argument("--cohort", type=command.count, default=1000)
    ask.add_argument("--rounds", type=command.count, default=20, help="rounds a turn to time (default 20)")
    ask.add_argument("--actors", type=command.count, default=2)
    ask.add_argument("--json", action="store_true", help="print one JSON object")
    args = ask.parse_args(argv)
    held, took = memory(args.clients, args.cohort, args.actors), time(args.rounds, args.actors)
    if args.json:
        print(json.dumps({"machine": command.machine(), "memory": held, "time": took}))
        return
    rows = [
        [t["process"], held["most_bytes"][t["process"]] / 1e6, t["fitted_growth_bytes"] / 1e6] for t in held["after"]
    ]
    title = f"{args.clients:,} clients with a state of {(FEATURES + 1) * CLASSES * 4:,} bytes each"
    command.show(title, ["process", "most, MB", "growth after all were heard, MB"], rows)
    row = [took[k] for k in ("scaffold_s", "fedavg_s", "ratio", "least", "most")]
    command.show("LeNet, 12 local steps, cohort 16", ["scaffold, s", "fedavg, s", "ratio", "least", "most"], [row])


if __name__ == "__main__":
    main()
