"""Check the rules behind ``auto`` against measurement: ``python -m benchmarks.rules --case mlp``.

``fedfleet bench --rules`` measures, as this does, the rule's choice of ``inner`` and ``block_size`` and its neighbours, in turns.
Blocks are not captured: to capture those of a dozen candidates would take longer than to compare them.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from typing import Any

from benchmarks import command, engine, world
from benchmarks.command import say
from benchmarks.peers.workload import Case
from fedfleet.commands import rules


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a case; return what was found as plain data."""
    ready = world.build(case)
    z, notes, rule = ready.task.init(case.seed), world.notes(ready), world.rule(ready)
    simulation = rules.Simulation(ready.algorithm, z, world.problem(ready), world.conditions(ready, rule))
    hows = rules.candidates(z, notes, case.cohort, rule)
    with closing(engine.executor(args.executor, args.actors, args.threads)) as executor:
        executor.start(world.setup(ready, rule.inner, capture=False))
        found = rules.measure(executor, simulation, hows, args.seconds, args.rounds, say)
    return {"case": case.name, "cohort": case.cohort, **rules.compared(found)}


def row(found: dict[str, Any]) -> list[object]:
    """Return a row of the table."""
    rule, best = found["rule"], found["best"]
    spread = f"{best['relative']:.2f} ({best['least']:.2f} to {best['most']:.2f})"
    took = [rule["failed"] or rule["seconds_per_round"], best["seconds_per_round"]]
    hows = [str(rules.How(r["inner"], r["block_size"])) for r in (rule, best)]
    measured = sum(r["turns"] > 0 for r in found["candidates"])
    return [
        *(found["case"], found["cohort"], hows[0], took[0], hows[1], took[1], spread, best["turns"]),
        f"{measured} of {len(found['candidates'])}",
    ]


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.rules", __doc__)
    command.add_case(ask)
    command.add_workers(ask)
    ask.add_argument(
        "--seconds", type=command.seconds, default=rules.SECONDS, help="for each case (default %(default)g)"
    )
    ask.add_argument(
        "--rounds", type=command.count, default=rules.ROUNDS, help="of each candidate (default %(default)d)"
    )
    ask.add_argument("--json", action="store_true", help="print JSON")
    args = ask.parse_args(argv)
    found = []
    for case in command.cases(args.case):
        say(f"{case.name}: cohort {case.cohort}, up to {args.seconds:g} s")
        found.append(measure(case, args))
    if args.json:
        print(json.dumps({"machine": command.machine(), "cases": found}))
        return
    columns = ["case", "cohort", "the rule's choice", "s a round", "best found", "s a round", "best / rule", "turns"]
    command.show("The rules against measurement", [*columns, "measured"], [row(f) for f in found])


if __name__ == "__main__":
    main()
