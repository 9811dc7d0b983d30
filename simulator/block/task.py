"""Blocks of clients: what is asked of a worker, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfleet.simulator.arithmetic import tree as T
from fedfleet.simulator.arithmetic.reduction import Merging, Reduction
from fedfleet.simulator.arithmetic.rng import Key
from fedfleet.simulator.arithmetic.spill import SpillFile
from fedfleet.simulator.arithmetic.tree import Tree
from fedfleet.simulator.block.faults import Dropped, Faults
from fedfleet.simulator.work import Phase


class BlockTask(NamedTuple):
    """The unit of dispatch: clients (C,) int64 with their copy numbers (C,), and what belongs to them alone.

    They are one block, or several, one after the other, whose numbers of clients are ``sizes``.

    ``limit`` (C,) int64 is the local steps after which each of them stops, if they may not finish. ``weights`` (C,)
    float64 is what each counts, None for 1, and ``discount`` what all do beside others. ``feedback`` says whether each
    client's loss is wanted, ``faults`` what is done about clients at fault. ``spill`` is the file for uploads that are
    kept, None for none.

    A block is filled up to the least of ``buckets``, rising, that holds it, with copies of its first client that count
    for nothing: blocks of few sizes come often enough to be captured.
    """

    phase: str
    clients: Tensor
    copies: Tensor
    key: Key
    steps: int | None = None
    limit: Tensor | None = None
    client_state: Tree = None
    client_input: Tree = None
    weights: Tensor | None = None
    discount: float = 1.0
    feedback: bool = False
    faults: Faults = Faults()
    spill: SpillFile | None = None
    sizes: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[BlockTask]:
        """The blocks, each as a task."""
        if len(self.sizes) < 2:
            return [self]
        ends = list(accumulate(self.sizes))
        return [self.part(slice(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)]

    def cut(self, sizes: Sequence[int], together: int) -> list[BlockTask]:
        """Return tasks of so many blocks each, the last of as many or fewer; ``sizes`` are the numbers of clients of all blocks."""
        if together >= len(sizes):
            return [self._replace(sizes=tuple(sizes))]
        tasks, before = [], 0
        for i in range(0, len(sizes), together):
            mine = tuple(sizes[i : i + together])
            tasks.append(self.part(torch.arange(before, before + sum(mine)))._replace(sizes=mine))
            before += sum(mine)
        return tasks

    def filled(self) -> BlockTask:
        """Return the task of a block that is filled."""
        clients = len(self.clients)
        room = next((room for room in self.buckets if room >= clients), clients)
        if room == clients:
            return self
        rows = torch.arange(room)
        return self.part(rows.where(rows < clients, 0))

    def part(self, rows: Tensor | slice) -> BlockTask:
        """Return the task of some of the clients, given by their positions, as one block."""
        given = (
            (name, getattr(self, name))
            for name in ("clients", "copies", "limit", "client_state", "client_input", "weights")
        )
        mine = {name: None if t is None else T.index(t, rows) for name, t in given}
        return self._replace(**mine, sizes=())


class BlockResult(NamedTuple):
    """What comes back: partial sums, never a client's upload unless the reduction stores it.

    Only the scalars in ``config``, (C,), and ``client_state``, stacked, are of each client. ``steps`` is the sum over the clients,
    ``loss`` a block that of the mean loss of each of the ``measured`` clients that took a gradient, and ``floats_up`` and
    ``bytes_up`` those of all together. ``losses`` (C,) float64 are each client's, NaN for
    none, if asked for. ``splits`` counts how often the block was halved for want of memory.

    The ``dropped`` clients, by row, are not among the C, and count for nothing. Where all were, partials are None and
    ``config`` and ``client_state`` empty.
    """

    partials: dict[str, Any]
    config: dict[str, Tensor]
    client_state: Tree
    steps: int
    loss: tuple[float, ...]
    measured: int
    floats_up: int
    bytes_up: int
    losses: Tensor | None = None
    splits: int = 0
    dropped: tuple[Dropped, ...] = ()

    def kept(self, task: BlockTask) -> Tensor:
        """Return which of the task's clients count, a mask."""
        kept = torch.ones(len(task.clients), dtype=torch.bool)
        if self.dropped:
            kept[[d.row for d in self.dropped]] = False
        return kept


def without(
    phase: Phase, task: BlockTask, rows: Tensor, dropped: Sequence[Dropped], result: BlockResult | None = None
) -> BlockResult:
    """Return what a block sends without those dropped, from what the others, its ``rows``, send; None where nobody is left."""
    if result is None:
        losses = torch.zeros(0, dtype=torch.float64) if task.feedback else None
        result = BlockResult(dict.fromkeys(phase.reduce), {}, None, 0, (), 0, 0, 0, losses)
    others = [d._replace(row=int(rows[d.row])) for d in result.dropped]
    return result._replace(dropped=tuple(sorted([*dropped, *others])))


def joined(reduce: Mapping[str, Reduction], results: Sequence[tuple[BlockTask, BlockResult]]) -> BlockResult:
    """Join the results of tasks that follow one another and are parts of one, which have as many blocks each, a power of two; but
    for the last, which may have fewer.
    """
    merging, dropped, before = Merging(reduce), [], 0
    for task, result in results:
        merging.add(result.partials, len(task.sizes) or 1)
        dropped += [d._replace(row=d.row + before) for d in result.dropped]
        before += len(task.clients)
    found = [result for _, result in results]
    config, client_state = (
        [r.config for r in found if r.config],
        [r.client_state for r in found if r.client_state is not None],
    )
    losses = [r.losses for r in found if r.losses is not None]
    return BlockResult(
        partials=merging.result(),
        config=T.concat(config) if config else {},
        client_state=T.concat(client_state) if client_state else None,
        steps=sum(r.steps for r in found),
        loss=sum((r.loss for r in found), ()),
        measured=sum(r.measured for r in found),
        floats_up=sum(r.floats_up for r in found),
        bytes_up=sum(r.bytes_up for r in found),
        losses=torch.cat(losses) if losses else None,
        splits=sum(r.splits for r in found),
        dropped=tuple(dropped),
    )


class BlockParting(NamedTuple):
    """How the workers of a node share a task of many blocks: each takes parts of so many ``blocks``.

    Results are added as one worker would add them (``Merging``): what comes of the task is the same, to the bit. ``reduce`` is the
    phase's.
    """

    reduce: Mapping[str, Reduction]
    blocks: int

    def split(self, task: BlockTask) -> list[BlockTask]:
        """Return the parts of a task."""
        return task.cut(task.sizes, self.blocks)

    def bare(self, part: BlockTask) -> BlockTask:
        """Return what joining has to know of a part."""
        return part._replace(limit=None, client_state=None, client_input=None, weights=None, spill=None)

    def join(self, parts: Sequence[BlockTask], results: Sequence[BlockResult]) -> BlockResult:
        """Return the result of a task from those of its parts."""
        return joined(self.reduce, list(zip(parts, results, strict=True)))
