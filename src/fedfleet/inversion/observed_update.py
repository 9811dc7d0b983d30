"""Observed updates: a round's first exchange, stopped where clients would work, and what the server has of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from fedfleet.middleware.secure_aggregation.secured import opened
from fedfleet.simulator.algorithm import Algorithm, Problem
from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import CollectUploads, Merging, Total
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.block import Setup, run_block
from fedfleet.simulator.block.task import BlockTask
from fedfleet.simulator.driver.round import Conditions
from fedfleet.simulator.driver.simulate import Position, play
from fedfleet.simulator.errors import FedfleetError
from fedfleet.simulator.executors.base import How, Job
from fedfleet.simulator.executors.local import LocalExecutor
from fedfleet.simulator.work import Message, Phase


@dataclass(frozen=True)
class Exchange:
    """What clients that will be heard in an exchange are asked: what all are sent, and the blocks in which they work."""

    shared: Message
    blocks: tuple[BlockTask, ...]

    @property
    def phase(self) -> str:
        """The phase."""
        return self.blocks[0].phase

    @property
    def clients(self) -> Tensor:
        """Those who will be heard (R,), in the order of the blocks."""
        return torch.cat([b.clients for b in self.blocks])

    def place(self, client: int) -> tuple[BlockTask, int]:
        """Return the block of a client, and its row there. Raises KeyError where it is not heard."""
        for block in self.blocks:
            if len(result := (block.clients == client).nonzero().flatten()):
                return block, int(result[0])
        raise KeyError(client)


class _Stopped(Exception):
    """An exchange whose clients were about to work."""

    def __init__(self, exchange: Exchange):
        super().__init__()
        self.exchange = exchange


class _Tap(LocalExecutor):
    """An executor that works on nothing, and says what it was asked."""

    def map(self, job: Job, shared: Message, tasks: Iterable[Any], **how: Unpack[How]) -> Iterator[Any]:
        """Raises _Stopped."""
        raise _Stopped(Exchange(shared, tuple(block for task in tasks for block in task.blocks)))


def observed_update(algorithm: Algorithm, at: Position, problem: Problem, conditions: Conditions) -> Exchange:
    """Return the first exchange of the next round, and leave the position as it was. Raises what ``play`` does."""
    before = at.memory.remembered()
    try:
        play(algorithm, at, problem, conditions, _Tap(threads=None))
    except _Stopped as e:
        return e.exchange
    finally:
        at.memory.restore(before)  # what a selection remembers, too, which outlasts a round that is aborted
    raise FedfleetError(f"round {at.index}: nobody is asked for anything")


def upload(setup: Setup, exchange: Exchange, client: int) -> Tree:
    """Return what the server has of what a client sent, by slot: to the bit, since the client works in its block.

    Raises KeyError where the client is not heard, ClientError where client code fails.
    """
    block, row = exchange.place(client)
    phase = setup.phases[exchange.phase]
    kept = replace(phase, reduce=dict.fromkeys(phase.reduce, CollectUploads()))
    result = _ran(setup, kept, exchange.shared, block)
    return {slot: T.index(stored.stacked(), row) for slot, stored in result.items()}


def total(setup: Setup, exchange: Exchange, plain: Phase) -> Tree:
    """Return what a server that sees sums alone has of all, by slot, as ``plain``, the phase without that, reduces it."""
    phase = setup.phases[exchange.phase]
    assert phase.secure is not None
    summed = replace(phase, reduce=dict.fromkeys(phase.reduce, Total()))  # whose masks, if any, would have cancelled
    merging = Merging(summed.reduce)
    for block in exchange.blocks:
        merging.add(_ran(setup, summed, exchange.shared, block))
    return opened(merging.result(), len(exchange.clients), phase.secure, plain.reduce, exchange.shared)


def _ran(setup: Setup, phase: Phase, shared: Message, block: BlockTask) -> dict[str, Any]:
    own = replace(setup, phases={**setup.phases, phase.name: phase})
    return run_block(own, shared, block._replace(spill=None)).partials
