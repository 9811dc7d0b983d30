"""Measure where the time of a round goes, on a configuration of one's own: ``fedfleet bench``.

The rounds are those of a run, evaluation included; nothing is written. Every row is measured, on the driver's clock or on
the workers', and the rows of each table add up: the driver's to the wall time, the workers' to the wall time of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fedfleet.experiments.experiment import Experiment
from fedfleet.experiments.runner import describe
from fedfleet.simulator.driver.evaluation import Measurement
from fedfleet.simulator.driver.simulate import RoundRecord, simulate
from fedfleet.simulator.driver.state import ClientStore
from fedfleet.simulator.executors.base import Executor
from fedfleet.simulator.executors.timed import Tally, TimedExecutor

WARMUP, WARMUP_S = 2, 1.0  # rounds, and seconds, at least; the second round, since methods may remember the one before
ROUNDS, ENOUGH_S = 5, 3.0  # timed rounds, and seconds of them, at least, if their number is not given
SECONDS = 20.0

DRIVER = {
    "sampling": "who is invited, who answers",
    "server": "cutting blocks, the server's step, the account",
    "put": "writing messages for all workers, once a phase",
    "dispatch": "handing out the first blocks",
    "wait": "until the next block is back, during which the others are handed out",
    "reduce": "merging what blocks send, as they come back",
    "evaluate": "starting an evaluation, waiting for what of it did not run beside a round, metrics",
    "other": "the rest of the wall time",
}
LOCAL = {
    "put": "nothing is put without workers",
    "dispatch": "nothing is handed out without workers",
    "wait": "the clients' work, in this process",
}


def measure(
    x: Experiment,
    rounds: int | None = None,
    seconds: float = SECONDS,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a few rounds and return what was measured, as plain data; the executor is started and closed.

    Without ``rounds``, some seconds of them are timed, in whole periods of evaluation. No round begins after so many
    ``seconds``, but one is always timed.
    """
    with torch.random.fork_rng(devices=[]), closing(TimedExecutor(x.executor())) as executor:
        tell(f"starting: {describe(x)}")
        executor.start(x.setup())
        tell(f"{rounds or 'some seconds of'} rounds, at most {seconds:g} s, after a warm-up")
        Measurement(executor, x.task, x.z, x.evaluation).result()  # as a run begins
        loop = _Loop(x, executor)
        loop.play(lambda rounds, spent: rounds >= WARMUP and spent >= min(seconds, WARMUP_S))
        loop.reset()
        executor.reset()
        wall_s = loop.play(_until(rounds, x.config.evaluation.every, seconds))
        result = _account(x, loop, executor, wall_s)
        loop.settle()
    return result


def _until(rounds: int | None, every: int, seconds: float) -> Callable[[int, float], bool]:
    def enough(done: int, spent: float) -> bool:
        if rounds is not None:
            return done >= rounds
        return done >= ROUNDS and done % every == 0 and spent >= ENOUGH_S

    return lambda done, spent: spent >= seconds or enough(done, spent)


class _Loop:
    """The rounds of a run with their evaluations, timed as seen by the driver."""

    def __init__(self, x: Experiment, executor: Executor):
        self._x, self._executor = x, executor
        self._records = simulate(x.algorithm, x.z, x.problem, x.conditions(), executor, 2**31)
        self._held: Measurement | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.records: list[_Round] = []
        self.rounds_s, self.evaluate_s, self.evaluations = 0.0, 0.0, 0

    def play(self, enough: Callable[[int, float], bool]) -> float:
        """Run rounds until (rounds, seconds) are enough; return the seconds."""
        started = perf_counter()
        while True:
            self._turn()
            if enough(len(self.records), spent := perf_counter() - started):
                return spent

    def _turn(self) -> None:
        """Run a round, enter the evaluation that ran beside it, start its own if one is due."""
        started = perf_counter()
        record = next(self._records)
        ended = perf_counter()
        self.settle()
        if (record.index + 1) % self._x.config.evaluation.every == 0:
            self._evaluate(record)
        self.records.append(_Round(record))
        self.rounds_s += ended - started
        self.evaluate_s += perf_counter() - ended

    def _evaluate(self, record: RoundRecord) -> None:
        x, z = self._x, self._x.algorithm.views["global"].params(record.state)
        self._held = Measurement(self._executor, x.task, z, x.evaluation)
        x.evaluate_clients(self._executor, z, record.state, record.index + 1, ClientStore())
        if x.config.until is not None:  # the run needs the metric before it goes on
            self.settle()

    def settle(self) -> None:
        """Wait for the evaluation under way."""
        if self._held is not None:
            self._held.result()
            self._held = None
            self.evaluations += 1


class _Round:
    """What is kept of a round: its seconds, those of sampling, and how many clients were heard in its last phase."""

    def __init__(self, record: RoundRecord):
        self.seconds, self.sampling_s = record.seconds, record.sampling_s
        self.updates = len(record.phases[-1].responses.completed)


def _account(x: Experiment, loop: _Loop, executor: TimedExecutor, wall_s: float) -> dict[str, Any]:
    """Return everything a round, in seconds, clients, blocks and bytes."""
    e, n = x.config.executor, len(loop.records)
    own = {p.name: executor.phases.get(p.name, Tally()) for p in x.algorithm.phases}
    keys = ("put_s", "dispatch_s", "wait_s", "merge_s")
    put, dispatch, wait, reduce = (sum(getattr(t, k) for t in own.values()) for k in keys)
    sampling = sum(r.sampling_s for r in loop.records)
    driver = {
        "sampling": sampling,
        "server": loop.rounds_s - sampling - put - dispatch - wait - reduce,
        "put": put,
        "dispatch": dispatch,
        "wait": wait,
        "reduce": reduce,
        "evaluate": loop.evaluate_s,
        "other": wall_s - loop.rounds_s - loop.evaluate_s,
    }
    workers = sum(h.workers for h in executor.hosts)
    phases, evaluation = {k: t.compute_s / n for k, t in executor.phases.items()}, executor.evaluation.compute_s / n
    idle = workers * wall_s / n - evaluation - sum(phases.values())
    return {
        "run": describe(x),
        "executor": e.model_dump(mode="json"),
        "workers": workers,
        "rounds": n,
        "evaluations": loop.evaluations,
        "evaluation_every": x.config.evaluation.every,
        "seconds_per_round": median(r.seconds for r in loop.records),
        "wall_seconds_per_round": wall_s / n,
        "client_updates_per_s": median(r.updates / r.seconds for r in loop.records),
        "blocks_per_round": sum(t.tasks for t in own.values()) / n,
        "bytes_put_per_round": sum(t.put_bytes for t in own.values()) / n,
        "bytes_returned_per_round": sum(t.returned_bytes for t in own.values()) / n,
        "driver_seconds_per_round": {k: v / n for k, v in driver.items()},
        "workers_seconds_per_round": {"phases": phases, "evaluation": evaluation, "idle": idle},
        "idle_share": idle * n / (workers * wall_s),
        "nodes": {
            h.address: {
                "workers": h.workers,
                "tasks_per_round": h.tasks / n,
                "busy_share": h.busy_s / max(1e-9, h.workers * wall_s),
            }
            for h in executor.hosts
        },
        "phases": {
            k: {
                "blocks_per_round": t.tasks / n,
                "clients_per_round": t.clients / n,
                "seconds_per_client": t.compute_s / max(1, t.clients),
            }
            for k, t in executor.phases.items()
        },
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print what was measured."""
    local = result["executor"]["kind"] == "local"
    console.print(f"{result['run']}, blocks of {result['executor']['block_size']}", markup=False, soft_wrap=True)
    head = Table(show_header=False)
    for key, value in _head(result):
        head.add_row(key, value)
    console.print(head)

    wall = result["wall_seconds_per_round"]
    table = _table("The driver, a round (mean)", "", "ms", "share", "what it is")
    for key, seconds in result["driver_seconds_per_round"].items():
        table.add_row(key, *_time(seconds, wall), LOCAL.get(key, DRIVER[key]) if local else DRIVER[key])
    table.add_section()
    table.add_row("wall", *_time(wall, wall), "")
    console.print(table)

    total, spent = wall * result["workers"], result["workers_seconds_per_round"]
    title = "This process as the worker" if local else f"The {result['workers']} workers together"
    table = _table(f"{title}, a round (mean)", "", "ms", "share", "blocks", "clients", "ms a client")
    for key, p in result["phases"].items():
        counts = (p["blocks_per_round"], p["clients_per_round"], 1000 * p["seconds_per_client"])
        table.add_row(f"phase {key}", *_time(spent["phases"][key], total), *(f"{v:,.4g}" for v in counts))
    for key in ("evaluation", "idle"):
        table.add_row(key, *_time(spent[key], total))
    table.add_section()
    table.add_row("wall" if local else "workers x wall", *_time(total, total))
    console.print(table)
    idle = "the driver's own work" if local else "no block at hand, or Ray is receiving a block or sending a result"
    console.print(f"phase: its blocks from start to end, on the workers' clocks; idle: {idle}", soft_wrap=True)
    if len(result["nodes"]) > 1:
        table = _table("By node", "address", "workers", "tasks a round", "share of the time at work")
        for address, at in result["nodes"].items():
            table.add_row(address, f"{at['workers']}", f"{at['tasks_per_round']:,.4g}", f"{at['busy_share']:.1%}")
        console.print(table)
    if not result["evaluations"]:
        console.print(
            f"no evaluation ended within these rounds (evaluation.every={result['evaluation_every']}): raise --rounds or "
            f"--seconds to see one",
            soft_wrap=True,
        )


def _head(result: dict[str, Any]) -> list[tuple[str, str]]:
    n, seconds = result["rounds"], result["seconds_per_round"]
    head = [
        ("rounds", f"{n} after a warm-up; evaluations: {result['evaluations']}"),
        ("a round (median)", f"{seconds:.4g} s, from the invitation to the new model, without evaluation"),
        (
            "client updates/s",
            f"{result['client_updates_per_s']:,.4g} (clients that completed the last phase; median round)",
        ),
        ("blocks a round", f"{result['blocks_per_round']:.4g}, all phases"),
    ]
    if result["executor"]["kind"] == "ray":
        put, returned = (result[f"bytes_{k}_per_round"] / 1e6 for k in ("put", "returned"))
        moved = f"{put:,.4g} MB put, a message to all clients counted once; {returned:,.4g} MB returned"
        head.append(("tensors, a round", moved))
    return head


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i and column != "what it is" else "left")
    return table


def _time(seconds: float, of: float) -> tuple[str, str]:
    return f"{1000 * seconds:,.2f}", f"{seconds / of:.1%}"
