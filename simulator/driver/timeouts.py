"""Clients that do not come to an end: who they are, and what their block sends without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from fedfleet.simulator.block.faults import Dropped
from fedfleet.simulator.block.task import BlockResult, BlockTask, without
from fedfleet.simulator.driver.records import PhaseRecord
from fedfleet.simulator.errors import ClientTimeout
from fedfleet.simulator.work import Phase

NOT_DONE = "not done after"
Run = Callable[[list[BlockTask]], Iterator[BlockResult]]
"""Runs blocks; ClientTimeout is raised in the place of a result that takes too long, and the iterator goes on."""


def limit_s(tasks: list[BlockTask]) -> float | None:
    """Return how long a block of these may take: as long as its clients one after the other; None for ever."""
    each = tasks[0].faults.client_timeout_s
    return None if each is None else each * max(len(t.clients) for t in tasks)


def without_slow(phase: Phase, task: BlockTask, run: Run) -> BlockResult:
    """Run each client of a block that took too long alone, and then all that come to an end as a block of their own.

    Raises ClientTimeout, naming the client, where it is not to be dropped, and naming the block where none takes too long alone.
    """
    rows, slow = torch.arange(len(task.clients)), list[Dropped]()
    while len(rows):
        result = _slow(task.part(rows), run)
        slow += [d._replace(row=int(rows[d.row])) for d in result]
        rows = rows[~torch.isin(rows, torch.tensor([d.row for d in slow]))]
        if not len(rows):
            break
        try:
            return without(phase, task, rows, slow, next(run([task.part(rows)])))
        except ClientTimeout:
            continue
    return without(phase, task, rows, slow)


def all_hung(records: Sequence[PhaseRecord]) -> bool:
    """Say whether, in an attempt at a round that is aborted, all clients that worked in its last phase were too slow."""
    dropped = [event["why"] for event in records[-1].events if event["event"] == "client_dropped"] if records else []
    return bool(dropped) and records[-1].counts["completed"] == 0 and all(why.startswith(NOT_DONE) for why in dropped)


def _slow(task: BlockTask, run: Run) -> list[Dropped]:
    """Return the clients that take too long alone. Raises ClientTimeout where there is none, or they are not to be dropped."""
    result, alone = [], run([task.part(slice(row, row + 1)) for row in range(len(task.clients))])
    why = f"{NOT_DONE} {task.faults.client_timeout_s:g} s"
    for row, client in enumerate(task.clients.tolist()):
        try:
            next(alone)
        except ClientTimeout:
            if task.faults.on_client_error == "fail":
                raise ClientTimeout(
                    f"client {client}, phase {task.phase!r}: {why}: look for a loop without end, or raise faults.client_timeout_s"
                ) from None
            result.append(Dropped(row, client, why, bit_exact=False))
    if not result:
        raise ClientTimeout(
            f"phase {task.phase!r}: a block of {len(task.clients)} clients is not done in {len(task.clients)} times "
            f"faults.client_timeout_s={task.faults.client_timeout_s:g}, though each of them alone is: raise it"
        )
    return result
