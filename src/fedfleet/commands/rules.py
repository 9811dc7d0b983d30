"""Measure which ``executor.inner`` and ``executor.block_size`` are fastest: ``fedfleet bench --rules``.

Candidates take turns on the same workers, each going through the same rounds, so that a machine that grows slower or faster
does so for all of them; they are compared within a turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from fedfleet.config import resolve, rules
from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.runner import describe
from fedfleet.simulator.algorithm import Algorithm, Problem
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.factored import Notes
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import RoundRecord, simulate
from fedfleet.simulator.errors import ClientError, FedfleetError
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.inner import InnerExecutor

SECONDS, ROUNDS = 60.0, 30
LADDER = (-2, -1, 0, 1, 2)
"""Powers of two by which a candidate's number of blocks differs from the rule's."""
WARMUP_S = 1.0
TURN_S, TURN_ROUNDS = 0.1, 5  # rounds a turn: so many seconds of them, within limits
# Times the fastest, after the first, second, later turns: such a candidate takes no more turns.
HOPELESS = (3.0, 2.0, 1.5)
FIRST_TURN = 0.6  # share of the time after which no further candidate is tried
AHEAD, FINALISTS = 3, 3  # candidates that go on are so few that so many turns fit, but not fewer than these
CLOSE = 0.95  # times the rule's choice: a gain not worth a key


class How(NamedTuple):
    """How blocks are run: "serial", "batched" or "factored", and the clients a block."""

    inner: str
    block_size: int

    def __str__(self) -> str:
        return f"{self.inner}, blocks of {self.block_size}"


class Simulation(NamedTuple):
    """What is simulated, whoever computes it."""

    algorithm: Algorithm
    z: Tree
    problem: Problem
    conditions: Conditions


@dataclass
class Candidate:
    """What was measured of one way: seconds a round (the median of each turn), or why it failed."""

    how: How
    turns: list[float] = field(default_factory=list)
    failed: str | None = None

    def ratios(self, to: Candidate) -> list[float]:
        """Return the seconds a round over those of another candidate in the same turns, ascending."""
        return sorted(a / b for a, b in zip(self.turns, to.turns, strict=False))


_Running = tuple[Candidate, Iterator[RoundRecord]]


def candidates(z: Tree, notes: Notes, cohort: int, rule: How, also: Iterable[How] = ()) -> list[How]:
    """Return what is worth trying, the rule's choice first and its neighbours next; ``also`` is tried too.

    Blocks are of equal size, half as many or twice as many from one candidate to the next.
    """
    inners = ["serial", "batched"]
    if any(rules.factors(path, leaf, notes) for path, leaf in T.named_leaves(z)):
        inners.append("factored")
    blocks = -(-cohort // rule.block_size)
    numbers = [min(cohort, max(1, round(blocks * 2.0**power))) for power in sorted(LADDER, key=abs)]
    sizes = dict.fromkeys([rule.block_size, *(math.ceil(cohort / number) for number in numbers)])
    nearest_first = [How(inner, size) for size in sizes for inner in sorted(inners, key=lambda i: i != rule.inner)]
    return list(dict.fromkeys([rule, *also, *nearest_first]))


def measure(
    executor: Executor,
    simulation: Simulation,
    hows: list[How],
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Candidate]:
    """Let all take turns on an executor that has been started, until each had so many rounds or the ``seconds`` are over.

    The first of them, the rule's choice, is always measured. Those much slower than the fastest take no further turns.
    """
    started = perf_counter()
    result = [Candidate(how) for how in hows]
    pace = _pace(executor, simulation, hows[0], seconds)
    running = [(c, _rounds(executor, simulation, c.how)) for c in result]
    turns = math.ceil(rounds / pace.a_turn)
    for turn in range(turns):
        for i, (candidate, records) in enumerate(running):
            spent = perf_counter() - started
            if turn and spent > seconds:
                return result
            if not turn and i and spent > FIRST_TURN * seconds:
                break
            try:
                for _ in range(0 if turn else pace.warmup):
                    next(records)
                candidate.turns.append(median(next(records).seconds for _ in range(pace.a_turn)))
            except (ClientError, RuntimeError) as e:  # a RuntimeError: memory ran out
                candidate.failed = (str(e).splitlines() or [type(e).__name__])[0]
            if not turn:
                said = candidate.failed or f"{candidate.turns[0]:.4g} s a round"
                tell(f"turn 1, {i + 1} of {len(running)}: {candidate.how}: {said}")
        left_s = (seconds - (perf_counter() - started)) / pace.a_turn
        running = _promising(running, result[0], turn, left_s)
        if len(running) < 2:
            break
        tell(f"turn {turn + 1} of {turns} done; {len(running)} of {len(result)} candidates left")
    return result


class _Pace(NamedTuple):
    """Rounds before the first turn, and rounds a turn: the same for all, so that all compare in the same rounds."""

    warmup: int
    a_turn: int


def _pace(executor: Executor, simulation: Simulation, how: How, seconds: float) -> _Pace:
    """Warm the workers up, and learn from it how long rounds are."""
    started, took = perf_counter(), []
    with suppress(ClientError, RuntimeError):  # its turn will say so
        for record in _rounds(executor, simulation, how):
            took.append(record.seconds)
            if perf_counter() - started > min(WARMUP_S, seconds):
                break
    typical = min(took, default=WARMUP_S)
    return _Pace(2 if typical < WARMUP_S else 1, min(TURN_ROUNDS, max(1, round(TURN_S / typical))))


def _promising(running: list[_Running], rule: Candidate, turn: int, left_s: float) -> list[_Running]:
    """Return who takes the next turn: the rule's choice, and of those that may still be the fastest as many as time allows."""
    alive = sorted(((c, r) for c, r in running if c.turns and not c.failed), key=lambda x: median(x[0].turns))
    limit = HOPELESS[min(turn, len(HOPELESS) - 1)] * min((median(c.turns) for c, _ in alive), default=0.0)
    kept, cost = [x for x in alive if x[0] is rule], 0.0
    for candidate, records in alive:
        cost += AHEAD * median(candidate.turns)
        near = median(candidate.turns) <= limit and (len(kept) < FINALISTS or cost <= left_s)
        if near and candidate is not rule:
            kept.append((candidate, records))
    return kept


def _rounds(executor: Executor, s: Simulation, how: How) -> Iterator[RoundRecord]:
    conditions = replace(s.conditions, block_size=how.block_size)
    return simulate(s.algorithm, s.z, s.problem, conditions, InnerExecutor(executor, how.inner), 2**31)


def compared(result: list[Candidate]) -> dict[str, Any]:
    """Return candidates as plain data: seconds a round, and the ratios to the first given, the rule's choice.

    Those that took all turns come first, the fastest of them at the top.

    Raises FedfleetError where all failed.
    """
    rule = result[0]
    there = [c for c in result if c.turns and c.failed is None]
    if not there:
        raise FedfleetError(f"every candidate failed; {rule.how}: {rule.failed}")
    base = rule if rule in there else min(there, key=lambda c: median(c.turns))
    most = max(len(c.turns) for c in there)
    there.sort(key=lambda c: (len(c.turns) < most - 1, median(c.ratios(base))))  # the last turn may have been cut short
    best = there[0]
    rows = []
    for c in [*there, *(c for c in result if c not in there)]:
        ratios = c.ratios(base)
        row = {
            **c.how._asdict(),
            "seconds_per_round": median(c.turns) if c.turns else None,
            "relative": median(ratios) if ratios else None,
            "least": min(ratios, default=None),
            "most": max(ratios, default=None),
            "turns": len(c.turns),
            "rule": c is rule,
            "best": c is best,
            "failed": c.failed,
        }
        rows.append(row)
    return {
        "rule": next(row for row in rows if row["rule"]),
        "best": next(row for row in rows if row["best"]),
        "keys": [f"executor.inner={best.how.inner}", f"executor.block_size={best.how.block_size}"],
        "candidates": rows,
    }


def take_turns(
    x: Experiment, seconds: float = SECONDS, rounds: int = ROUNDS, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure candidates for an experiment and return plain data; the executor is started and closed."""
    e, cohort, device = x.config.executor, x.answers, resolve.device(x.config)
    rule = How(rules.inner(x.z, x.notes, device), rules.block_size(cohort, x.z, x.notes, device))
    configured = How(e.inner, min(int(e.block_size), cohort))
    hows = candidates(x.z, x.notes, cohort, rule, [configured])
    with torch.random.fork_rng(devices=[]), closing(x.executor()) as executor:
        tell(f"starting: {describe(x)}; {len(hows)} candidates, up to {seconds:g} s")
        executor.start(x.setup())
        simulation = Simulation(x.algorithm, x.z, x.problem, x.conditions())
        result = compared(measure(executor, simulation, hows, seconds, rounds, tell))
    for row in result["candidates"]:
        row["configured"] = configured == (row["inner"], row["block_size"])
    return {"run": describe(x), "executor": e.model_dump(mode="json"), **result}


def show(result: dict[str, Any], console: Console) -> None:
    """Print what was measured, and the keys to set."""
    console.print(result["run"], markup=False, soft_wrap=True)
    table = Table(
        title="Rounds without evaluation; those that took all turns first, then the fastest", title_justify="left"
    )
    for i, name in enumerate(("inner", "block_size", "s a round", "relative (least to most)", "turns", "")):
        table.add_column(name, justify="right" if 0 < i < 5 else "left", overflow="fold")
    for row in result["candidates"]:
        marks = [text for text, marked in _marks(row).items() if marked]
        numbers = ("-", "-")
        if row["turns"]:
            spread = f"{row['relative']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
            numbers = (f"{row['seconds_per_round']:.4g}", spread)
        elif row["failed"] is None:
            marks.append("not measured: out of time")
        if row["failed"]:
            marks.append(f"failed: {row['failed']}")
        table.add_row(row["inner"], f"{row['block_size']}", *numbers, f"{row['turns']}", ", ".join(marks))
    console.print(table)
    console.print("relative: seconds a round over those of the rule's choice, median over the turns", soft_wrap=True)
    inner, size = result["best"]["inner"], result["best"]["block_size"]
    console.print(f"fastest: {' '.join(result['keys'])}", soft_wrap=True)
    console.print(f"in YAML: executor: {{inner: {inner}, block_size: {size}}}", soft_wrap=True)
    for line in _advice(result):
        console.print(line, soft_wrap=True)


def _marks(row: dict[str, Any]) -> dict[str, bool]:
    return {"rule": row["rule"], "configured": row["configured"] and not row["rule"], "best": row["best"]}


def _advice(result: dict[str, Any]) -> list[str]:
    rule, best = result["rule"], result["best"]
    if best["rule"]:
        return ["That is the rule's choice: leave both keys at auto."]
    said = []
    if not rule["failed"] and best["relative"] > CLOSE:
        said.append(f"The rule's choice is within {1 - CLOSE:.0%} of it: leaving both keys at auto will do.")
    elif not rule["failed"] and (best["turns"] < AHEAD or best["most"] >= 1):
        said.append(
            "It was not faster in each of several turns: measure again, with more --seconds, on an idle machine."
        )
    return [*said, "Another inner or block_size changes low bits of results: compare runs that have the same."]
