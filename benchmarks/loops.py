"""Bare loops in plain torch, without any framework: ``python -m benchmarks.loops --case logistic --processes 2``.

They train one client after the other or, ``--batched``, all clients of a cohort at once under ``torch.func.vmap``.
Each loop is one process with one thread. Several are started together, wait for each other before the first timed round, and
go on until the last has timed its rounds, so that all are timed under the same load; their rates are added.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import cdma_loop, command, fedmm_loop, lists
from benchmarks.command import say
from benchmarks.peers import workload
from benchmarks.peers.workload import Case
from benchmarks.results import emit, result

PATIENCE_S = 600
_meeting: tuple[Barrier, Any]


def fedavg(case: Case, model: nn.Module) -> Callable[[int], None]:
    """Return a function that runs round t of FedAvg on ``model`` in place."""
    x, y = workload.data(case)
    parameters = list(model.parameters())

    def round(t: int) -> None:
        start = [p.detach().clone() for p in parameters]
        total = lists.zeros(start)
        for client in workload.cohort(case, t):
            lists.copy(parameters, start)
            workload.train(model, x[client], y[client], case)
            lists.add(total, parameters)
        lists.scale(total, 1 / case.cohort)
        lists.copy(parameters, total)

    return round


def batched_fedavg(case: Case, model: nn.Module) -> Callable[[int], None]:
    """Return the same, with all clients of a round side by side."""
    x, y = workload.data(case)
    parameters = dict(model.named_parameters())

    def loss(z: dict[str, Tensor], rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, z, (rows,)), labels)

    gradients = torch.func.vmap(torch.func.grad(loss))

    def round(t: int) -> None:
        clients = workload.cohort(case, t)
        z = {name: p.detach().expand(len(clients), *p.shape) for name, p in parameters.items()}
        rows, labels = x[clients], y[clients]
        for _ in range(case.epochs):
            for some, theirs in zip(rows.split(case.batch, 1), labels.split(case.batch, 1), strict=True):
                found = gradients(z, some, theirs)
                z = {name: v - case.lr * found[name] for name, v in z.items()}
        lists.copy(list(parameters.values()), [v.mean(0) for v in z.values()])

    return round


def prepare(case: Case, model: nn.Module, *, batched: bool = False) -> tuple[Callable[[int], None], list[nn.Parameter]]:
    """Return a function that runs round t of a case, starting at ``model``, and the net's parameters, which it moves."""
    if batched:
        return batched_fedavg(case, model), list(model.parameters())
    if case.algorithm == "cdma_ada":
        run, point = cdma_loop.cdma_ada(case, model)
        return run, list(point.net.parameters())
    if case.algorithm == "fedmm":
        run, player = fedmm_loop.fedmm(case)
        return run, [*player.features.parameters(), *player.head.parameters()]
    return fedavg(case, model), list(model.parameters())


def _join(barrier: Barrier, finished: Any) -> None:
    global _meeting
    _meeting = barrier, finished


def _time(case: Case, batched: bool) -> list[float]:
    """Time rounds in one of several processes."""
    torch.set_num_threads(1)
    barrier, finished = _meeting
    run, _ = prepare(case, workload.net(case), batched=batched)
    for t in range(case.warmup):
        run(t)
    barrier.wait(PATIENCE_S)
    seconds = []
    for t in range(case.warmup, case.warmup + case.rounds):
        started = time.perf_counter()
        run(t)
        seconds.append(time.perf_counter() - started)
    with finished.get_lock():
        finished.value += 1
    while finished.value < barrier.parties:  # keep the machine loaded for the others
        run(0)
    return seconds


def measure(case: Case, processes: int, *, batched: bool = False) -> dict[str, Any]:
    """Run so many loops at the same time and return their summed rates as plain data."""
    context = multiprocessing.get_context("spawn")
    meeting = (context.Barrier(processes), context.Value("i", 0))
    with ProcessPoolExecutor(processes, context, _join, meeting) as pool:
        jobs = [pool.submit(_time, case, batched) for _ in range(processes)]
        each = [result(case, job.result(), "") for job in jobs]
    kind = "batched" if batched else "bare"
    several = f"{processes} {kind} loops at once" if processes > 1 else f"{kind} loop, 1 thread"
    rates = {key: sum(r[key] for r in each) for key in ("client_updates_per_s", "client_steps_per_s")}
    return {**each[0], **rates, "executor": several, "seconds": [r["seconds"] for r in each]}


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    ask = command.parser("benchmarks.loops", __doc__)
    command.add_case(ask)
    ask.add_argument("--processes", type=command.count, default=1, help="loops at the same time")
    ask.add_argument("--batched", action="store_true", help="all clients of a cohort at once; FedAvg only")
    command.add_rounds(ask)
    args = ask.parse_args(argv)
    found = []
    for case in command.cases(args.case, rounds=args.rounds, warmup=args.warmup):
        if args.batched and case.algorithm != "fedavg":
            say(f"{case.name}: left out, it is not FedAvg")
            continue
        say(f"{case.name}: {args.processes} loop(s), {case.warmup} + {case.rounds} rounds")
        found.append(measure(case, args.processes, batched=args.batched))
    emit(found, "plain torch", args.json)


if __name__ == "__main__":
    main()
