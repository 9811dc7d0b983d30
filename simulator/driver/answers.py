"""Answers of the clients of a phase: blocks merged in order, and who was dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic.reduction import Merging, merge
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.faults import Dropped
from fedfleet.simulator.block.task import BlockParting, BlockResult, BlockTask
from fedfleet.simulator.block.uploads import put_down
from fedfleet.simulator.driver.timeouts import Run, without_slow
from fedfleet.simulator.errors import ClientTimeout
from fedfleet.simulator.fleet.late import Assignment
from fedfleet.simulator.work import Phase


class Group(NamedTuple):
    """Clients that start from one message, in the ``order`` of the blocks, the tasks, what an answer counts, and how nodes share a
    task.
    """

    asked: Assignment
    order: Tensor
    tasks: list[BlockTask]
    discount: float
    sharding: BlockParting | None = None

    @property
    def counts(self) -> Tensor:
        """What each answer counts (C,) float64, but for the phase's own weight."""
        if self.asked.weights is not None:
            return self.discount * self.asked.weights
        return torch.full((len(self.asked.clients),), self.discount, dtype=torch.float64)


class Answers(NamedTuple):
    """What came back from groups of clients, some of which may have been dropped.

    Attributes:
        partials: slot -> merged partial result.
        config: scalar -> (R,), of the R clients that count.
        kept: a group -> which of its clients count, a mask.
        results: the blocks', without partials.
        client_state: the clients of a block, and their new states.

    """

    partials: dict[str, Any]
    config: dict[str, Tensor]
    kept: list[Tensor]
    results: list[BlockResult]
    client_state: list[tuple[Tensor, Tree]]

    @property
    def dropped(self) -> list[Dropped]:
        """Those dropped, in the order of the blocks."""
        return [d for r in self.results for d in r.dropped]


def merged(
    phase: Phase, groups: list[Group], started: list[Iterator[BlockResult]], again: Callable[[Group], Run]
) -> Answers:
    """Merge what groups send, block by block; ``again`` runs blocks of a group once more, where one takes too long."""
    found = Answers(dict.fromkeys(phase.reduce), {}, [], [], [])
    for group, running in zip(groups, started, strict=True):
        masks, merging = [], Merging(phase.reduce)
        for task in group.tasks:
            try:
                result = next(running)
            except ClientTimeout:
                result = without_slow(phase, task, again(group))
            partials = put_down(task.phase, task.spill, result.partials)  # what a worker of another machine could not
            merging.add(partials, len(task.sizes) or 1)
            masks.append(result.kept(task))
            if result.client_state is not None:
                found.client_state.append((task.clients[masks[-1]], result.client_state))
            found.results.append(result._replace(partials={}, client_state=None))
        found.kept.append(torch.cat(masks))
        mine = merging.result()
        for slot, reduction in phase.reduce.items():
            found.partials[slot] = merge(reduction, found.partials[slot], mine[slot])
    configs = [r.config for r in found.results if r.config]  # where all clients of a block were dropped, there is none
    found.config.update({k: torch.cat([c[k] for c in configs]) for k in (configs[0] if configs else ())})
    return found


def listed(dropped: Sequence[Dropped]) -> str:
    """Say how many clients were dropped, and why the first."""
    first = dropped[0]
    return f"{len(dropped)} dropped, the first client {first.client} ({first.why})"
